// The rows of each sequence with the padded rows at the same places: jagged_dense_add and
// jagged_dense_mul.
//
//   z_b[i] = combine(x_b[i], y[b, i]) for i < M, else keep(x_b[i])
//
// Grid: x, a warp for each kRows rows of the result, of whichever sequences. Each lane finds the
// place of one of them (rows/places.cuh), and so where its operands are; shuffles tell the others.
// Lanes are beside each other along a row, in vectors of 16 bytes (or elements, where alignment
// forbids them); what they leave over of the warp takes the next rows. No shared memory, no
// barriers. Rows outside every sequence become zeros.
//
// Each element is computed alone, in f32 (f64 of f64): deterministic.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/combine.h"
#include "cuda/kernels/rows/places.cuh"
#include "cuda/kernels/rows/row_type.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda::rows {

struct Add {
  static constexpr bool kKeepsX = true;
  template <typename Element>
  static __device__ __forceinline__ Element apply(Element x, Element y) {
    if constexpr (std::is_same_v<Element, Truth>) {
      return Truth{static_cast<uint8_t>(x.value | y.value)};
    } else if constexpr (std::is_integral_v<Element>) {
      using Bits = std::make_unsigned_t<Element>;  // they wrap around
      return static_cast<Element>(static_cast<Bits>(x) + static_cast<Bits>(y));
    } else {
      return from_sum<Element>(to_sum(x) + to_sum(y));
    }
  }
};

struct Multiply {
  static constexpr bool kKeepsX = false;
  template <typename Element>
  static __device__ __forceinline__ Element apply(Element x, Element y) {
    return from_sum<Element>(to_sum(x) * to_sum(y));
  }
};

template <typename Combine, typename Element, int kVector>
__device__ __forceinline__ Raw<Element, kVector> combine(const Raw<Element, kVector>& x,
                                                         const Raw<Element, kVector>& y) {
  using Elements = Vector<Element, kVector>;
  static_assert(sizeof(Elements) == sizeof(x));
  Raw<Element, kVector> raw;
  Elements& result = reinterpret_cast<Elements&>(raw);
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    result.elems[e] = Combine::apply(reinterpret_cast<const Elements&>(x).elems[e],
                                     reinterpret_cast<const Elements&>(y).elems[e]);
  }
  return raw;
}

constexpr int kCombineCtas = 7;  // per SM, that the registers must leave room for

// Where each lane's row of an operand begins, in elements; kNothing: it has none, which is 0.
constexpr int64_t kNothing = -1;

// Rows of two operands, combined into `rows` <= 32 contiguous ones; lane i says where the i-th are.
// A row of x whose other operand has none is kept. All lanes of a warp together.
template <typename Combine, typename Element, int kVector>
__device__ __forceinline__ void combine_rows(const Element* gX, int64_t x_begin, const Element* gY,
                                             int64_t y_begin, Element* gOut, int rows,
                                             int64_t columns, int lanes_log2) {
  using Loaded = Raw<Element, kVector>;
  constexpr unsigned kAllLanes = 0xffffffffu;
  static_assert(kRows == 32, "a lane for each row");
  const int lane = threadIdx.x % 32, lanes = 1 << lanes_log2;
  const int first = lane >> lanes_log2, step = 32 >> lanes_log2;
  for (int64_t group = 0; group < columns; group += lanes * kVector) {
    const int64_t column = group + (lane & (lanes - 1)) * kVector;
    const bool exists = column < columns;
#pragma unroll 1
    for (int row = 0; row < rows; row += kItems * step) {
      Loaded rX[kItems], rY[kItems];
      bool both[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int own = row + first + i * step;
        const int64_t x = __shfl_sync(kAllLanes, x_begin, own & 31);
        const int64_t y = __shfl_sync(kAllLanes, y_begin, own & 31);
        const bool is_row = exists && own < rows;
        rX[i] = rY[i] = Loaded{};
        both[i] = y != kNothing;
        if (is_row && x != kNothing) rX[i] = *reinterpret_cast<const Loaded*>(gX + x + column);
        if (is_row && y != kNothing) rY[i] = *reinterpret_cast<const Loaded*>(gY + y + column);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int own = row + first + i * step;
        if (exists && own < rows) {
          // Not combined where y has none: -0 + 0 would be 0.
          const Loaded result = both[i] ? combine<Combine, Element, kVector>(rX[i], rY[i]) : rX[i];
          *reinterpret_cast<Loaded*>(gOut + own * columns + column) = result;
        }
      }
    }
  }
}

struct CombineLaunch {
  CombineParams params;
  int lanes_log2;  // vectors of a row beside each other
};

template <typename Combine, typename Element, int kVector>
__global__ __launch_bounds__(kThreads, kCombineCtas) void combine_kernel(
    const __grid_constant__ CombineLaunch launch) {
  const CombineParams& params = launch.params;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  const int64_t left = params.offsets.total - begin;
  if (left <= 0) return;
  Place place[1];
  find_places(params.offsets, begin, place);
  const auto [seq, row] = place[0];
  int64_t x_begin = kNothing, y_begin = kNothing;
  if (seq >= 0 && row < params.max_len) {
    y_begin = seq * params.y_seq_stride + row * params.y_row_stride;
  }
  if (Combine::kKeepsX ? seq >= 0 : y_begin != kNothing) {
    x_begin = (begin + threadIdx.x % 32) * params.x_stride;
  }
  combine_rows<Combine, Element, kVector>(
      static_cast<const Element*>(params.x), x_begin, static_cast<const Element*>(params.y),
      y_begin, static_cast<Element*>(params.out) + begin * params.columns,
      left < kRows ? static_cast<int>(left) : kRows, params.columns, launch.lanes_log2);
}

// launch(vector) with a Vector of the elements that lanes take at a time.
template <typename Element, typename Launch>
cudaError_t with_vector(bool vectors, Launch launch) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(Element));
  return vectors ? launch(Vector<Element, kWide>{}) : launch(Vector<Element, 1>{});
}

template <typename Combine, typename Element>
cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream, const char* path) {
  return with_vector<Element>(params.vectors, [&](auto vector) {
    constexpr int kVector = sizeof(vector) / sizeof(Element);
    constexpr int64_t kCtaRows = int64_t{kWarps} * kRows;
    const CombineLaunch arguments{params, lanes_log2((params.columns + kVector - 1) / kVector)};
    return launch<combine_kernel<Combine, Element, kVector>>(
        arguments, {(params.offsets.total + kCtaRows - 1) / kCtaRows}, kThreads, 0, stream, path);
  });
}

}  // namespace jagged_cuda::rows
