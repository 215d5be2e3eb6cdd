// Rows that a whole warp reads more than once, since it cannot keep them (row_words.cuh).
#pragma once

#include "cuda/kernels/softmax/long_lines.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

// The words of a row that are a lane's, where the warp reads it more than once: whole words, of
// which each lane takes every 32nd, and an element at each of the row's ends, of lanes 0 and 1.
template <typename Element, bool kBackward, bool kStaged>
struct RowOfWarp {
  static constexpr int kPer = kPerWord<Element>;
  // Words of a lane whose loads are in flight: more would cost the kernel spills where rows are short.
  static constexpr int kBlock = (kBackward ? 4 : kStaged ? 4 : 6) * (kPer == 2 ? 1 : 2);
  static constexpr uint32_t kNeutral = kBackward ? 0 : kMinusInfinities<Element>;
  int head, wholes;
  int end;  // the place of this lane's element that is in no whole word; -1: none

  __device__ __forceinline__ RowOfWarp(const Element* gRow, int columns)
      : head(kPer == 2 && reinterpret_cast<uintptr_t>(gRow) % 4 != 0 ? 1 : 0),
        wholes((columns - head) / kPer) {
    const int lane = threadIdx.x % 32;
    end = lane == 0 && head != 0                        ? 0
          : lane == 1 && head + kPer * wholes < columns ? columns - 1
                                                        : -1;
  }

  // The element at `end`, the other half of its word neutral.
  __device__ __forceinline__ uint32_t load_end(const Element* gRow) const {
    uint32_t half = kNeutral & 0xffff;
    constexpr auto kLoad = kStaged ? ptx::ld_2 : ptx::ld_global_nc_2;
    if constexpr (kPer == 2) kLoad(half, gRow + end, -1, end);
    return kPer == 2 ? half | (kNeutral & 0xffff0000u) : kNeutral;
  }

  // Calls visit(its first word) for each block.
  template <typename Visit>
  __device__ __forceinline__ void for_each_block(Visit visit) const {
#pragma unroll 1
    for (int first = 0; first < wholes; first += 32 * kBlock) visit(first);
  }

  // A block of words from word `first` on.
  __device__ __forceinline__ void load(const Element* gRow, int first,
                                       uint32_t (&rX)[kBlock]) const {
    const int lane = threadIdx.x % 32;
    const Element* gWords = gRow + head + kPer * (first + lane);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      rX[i] = kNeutral;
      constexpr auto kLoad = kStaged ? ptx::ld_4 : ptx::ld_global_nc_4;
      kLoad(rX[i], gWords + 32 * kPer * i, first + lane + 32 * i, wholes);
    }
  }
  template <typename WordOf>
  __device__ __forceinline__ void store(Element* gRow, int first, WordOf word_of) const {
    const int lane = threadIdx.x % 32;
    Element* gWords = gRow + head + kPer * (first + lane);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      ptx::st_global_4(gWords + 32 * kPer * i, word_of(i), first + lane + 32 * i, wholes);
    }
  }
  template <typename WordOf>
  __device__ __forceinline__ void store_end(Element* gRow, WordOf word_of_end) const {
    if constexpr (kPer == 2) ptx::st_global_2(gRow + end, word_of_end(), -1, end);
  }
};

// A row of up to kMaxWarpWords words, which a warp reads three times, or backward twice.
template <typename Config>
__device__ __noinline__ void softmax_row_by_warp(const typename Config::Element* gX,
                                                 const typename Config::Element* gGrad,
                                                 typename Config::Element* gOut, int columns,
                                                 float factor) {
  using Element = typename Config::Element;
  using Row = RowOfWarp<Element, Config::kBackward, Config::kStaged>;
  constexpr int kPer = Row::kPer, kBlock = Row::kBlock;
  const Row row(gX, columns);
  const uint32_t end_x = row.load_end(gX);
  if constexpr (Config::kBackward) {
    const uint32_t end_grad = row.load_end(gGrad);
    float sum = 0;
    uint32_t rP[kBlock], rGrad[kBlock];
    row.for_each_block([&](int first) {
      row.load(gX, first, rP);
      row.load(gGrad, first, rGrad);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) add_products<Element>(sum, rP[i], rGrad[i]);
    });
    add_products<Element>(sum, end_x, end_grad);
    sum = combine_lanes(sum, 1, 32, [](float a, float b) { return a + b; });
    const auto result_of = [&](uint32_t p, uint32_t grad) {
      return gradient_word<Element>(p, grad, factor, [&](int) { return sum; });
    };
    row.for_each_block([&](int first) {
      row.load(gX, first, rP);
      row.load(gGrad, first, rGrad);
      row.store(gOut, first, [&](int i) { return result_of(rP[i], rGrad[i]); });
    });
    row.store_end(gOut, [&] { return result_of(end_x, end_grad); });
  } else {
    const Scale<float> scale{factor};
    uint32_t largest_word = end_x;
    uint32_t rX[kBlock];
    row.for_each_block([&](int first) {
      row.load(gX, first, rX);
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        largest_word = largest_of_words<Element>(largest_word, rX[i]);
    });
    const float maximum =
        shift_of(combine_lanes(largest_element<Element>(largest_word), 1, 32,
                               [](float a, float b) { return ptx::max_nan(a, b); }));
    SumOfExponentials<Element> sum;
    const auto add = [&](uint32_t word) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        sum.add(scale.exponential(element_of<Element>(word, e), maximum));
      }
    };
    row.for_each_block([&](int first) {
      row.load(gX, first, rX);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) add(rX[i]);
    });
    add(end_x);
    float inverse;
    if constexpr (SumOfExponentials<Element>::kInteger) {
      // Of all lanes there may be more than 32 bits. Terms of blocks are multiples of four.
      const unsigned long long own = sum.value - (static_cast<uint32_t>(kPer) << 30);
      inverse = reciprocal_of_count(combine_lanes(
          own, 1, 32, [](unsigned long long a, unsigned long long b) { return a + b; }));
    } else {
      inverse = reciprocal(combine_lanes(sum.value, 1, 32, [](float a, float b) { return a + b; }));
    }
    const auto result_of = [&](uint32_t word) {
      return probability_word<Element>(
          word, scale, [&](int) { return maximum; }, [&](int) { return inverse; });
    };
    row.for_each_block([&](int first) {
      row.load(gX, first, rX);
      row.store(gOut, first, [&](int i) { return result_of(rX[i]); });
    });
    row.store_end(gOut, [&] { return result_of(end_x); });
  }
}

}  // namespace jagged_cuda::softmax
