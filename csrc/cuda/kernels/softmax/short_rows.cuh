// Rows of which a few lanes of a warp keep all words in registers: read once, written once
// (row_words.cuh).
//
// kLanes lanes share a row, so that a warp computes 32 / kLanes rows abreast, each lane up to kItems words
// of its row, kLanes words apart.
//
// A row of 16-bit elements begins in the low or the high half of a word. It has ceil(columns / 2)
// words in either case, the last of which is *loose* if the row does not fill its words: its low
// half is the row's first element, if that lies in a high half, and its high half the row's last
// element, if that lies in a low half. The other words are whole, and no element of another row is
// touched.
#pragma once

#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

// Where a lane's words of a row lie: word kLanes * i + lane, behind the first element if that is
// loose.
template <typename Element>
struct RowPlace {
  bool head, tail;  // the first, and the last element are loose
  int wholes;       // whole words from the lane's first on
  bool exists;

  __device__ __forceinline__ bool has_loose() const { return head || tail; }
};

template <typename Element, int kLanes, int kItems, int kChecked, bool kStaged = false>
struct RowOfWords {
  static constexpr int kPer = kPerWord<Element>;
  int columns, words;
  int lane;  // of those that share the row

  static __device__ __forceinline__ bool checked(int i) { return i >= kItems - kChecked; }

  __device__ __forceinline__ RowPlace<Element> place(const Element* gRow, bool exists) const {
    RowPlace<Element> place{false, false, words - lane, exists};
    if constexpr (kPer == 2) {
      place.head = reinterpret_cast<uintptr_t>(gRow) % 4 != 0;
      place.tail = (columns - (place.head ? 1 : 0)) % 2 != 0;
      if (place.has_loose()) --place.wholes;
    }
    return place;
  }

  // The loose elements, for the lane that has them.
  struct Loose {
    uint32_t first, last;
  };

  __device__ __forceinline__ bool has_loose(const RowPlace<Element>& place, int i) const {
    return checked(i) && kLanes * i == place.wholes && place.has_loose();
  }

  // `gX`, staged of any memory, has a row where `place` has it. Nothing waits for what is loaded.
  __device__ __forceinline__ void load(const Element* gX, const RowPlace<Element>& place,
                                       uint32_t neutral, uint32_t (&rX)[kItems],
                                       Loose& loose) const {
    const Element* gWords = gX + (place.head ? 1 : 0) + lane * kPer;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rX[i] = neutral;
      if constexpr (kStaged) {
        ptx::ld_4(rX[i], gWords + kLanes * kPer * i, checked(i) ? kLanes * i : 0,
                  checked(i) ? place.wholes : 1);
      } else if (checked(i)) {
        ptx::ld_global_nc_4(rX[i], gWords + kLanes * kPer * i, kLanes * i, place.wholes);
      } else {
        rX[i] = __ldg(reinterpret_cast<const uint32_t*>(gWords + kLanes * kPer * i));
      }
    }
    if constexpr (kPer == 2) {
      loose.first = loose.last = neutral & 0xffff;
      const bool own = is_loose_lane();
      const auto load = kStaged ? ptx::ld_2 : ptx::ld_global_nc_2;
      load(loose.first, gX, 0, own && place.head);
      load(loose.last, gX + columns - 1, 0, own && place.tail);
    }
  }

  // Whether the last word is this lane's.
  __device__ __forceinline__ bool is_loose_lane() const { return (words - 1) % kLanes == lane; }

  // Puts the loose elements to the words.
  __device__ __forceinline__ void join(const RowPlace<Element>& place, const Loose& loose,
                                       uint32_t (&rX)[kItems]) const {
    if constexpr (kPer == 2) {
      const uint32_t word = loose.first | loose.last << 16;
#pragma unroll
      for (int i = kItems - kChecked; i < kItems; ++i) {
        if (has_loose(place, i)) rX[i] = word;
      }
    }
  }

  // Stores word_of(i) of each word to the row at gOut.
  template <typename WordOf>
  __device__ __forceinline__ void store(Element* gOut, const RowPlace<Element>& place,
                                        WordOf word_of) const {
    Element* gWords = gOut + (place.head ? 1 : 0) + lane * kPer;
    const int wholes = place.exists ? place.wholes : -1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t word = word_of(i);
      ptx::st_global_4(gWords + kLanes * kPer * i, word, checked(i) ? kLanes * i : 0,
                       checked(i) ? wholes : place.exists);
      if constexpr (kPer == 2) {
        if (place.exists && has_loose(place, i)) {
          ptx::st_global_2(gOut, word, 0, place.head);
          ptx::st_global_2(gOut + columns - 1, word >> 16, 0, place.tail);
        }
      }
    }
  }
};

// Reductions over the kLanes lanes that share a row.
template <int kLanes>
__device__ __forceinline__ float largest_of_lanes(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    value = ptx::max_nan(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}
template <int kLanes, typename Value>
__device__ __forceinline__ Value sum_of_lanes(Value value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

template <typename Element, int kLanes, int kItems, int kChecked, int kAtOnce, bool kStaged>
__device__ __forceinline__ void softmax_rows(const Element* gX, Element* gOut, int rows,
                                             int columns, int words, float exponent) {
  constexpr int kPer = kPerWord<Element>, kAbreast = 32 / kLanes;
  using Row = RowOfWords<Element, kLanes, kItems, kChecked, kStaged>;
  const int lane = threadIdx.x % 32;
  const Row own{columns, words, lane % kLanes};
  const Scale<float> scale{exponent};
#pragma unroll 1
  for (int first = 0; first < rows; first += kAbreast * kAtOnce) {
    RowPlace<Element> place[kAtOnce];
    Element* gRow[kAtOnce];
    uint32_t rX[kAtOnce][kItems];
    typename Row::Loose loose[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int row = first + r * kAbreast + lane / kLanes;
      // Lanes without a row of their own repeat the last one.
      const int64_t begin = static_cast<int64_t>(row < rows ? row : rows - 1) * columns;
      gRow[r] = gOut + begin;
      place[r] = own.place(gX + begin, row < rows);
      own.load(gX + begin, place[r], kMinusInfinities<Element>, rX[r], loose[r]);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      own.join(place[r], loose[r], rX[r]);
      uint32_t largest_word = rX[r][0];
#pragma unroll
      for (int i = 1; i < kItems; ++i) {
        largest_word = largest_of_words<Element>(largest_word, rX[r][i]);
      }
      const float maximum =
          shift_of(largest_of_lanes<kLanes>(largest_element<Element>(largest_word)));
      float rE[kItems][kPer];
      SumOfExponentials<Element> sum;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          rE[i][e] = scale.exponential(element_of<Element>(rX[r][i], e), maximum);
          sum.add(rE[i][e]);
        }
      }
      sum.value = sum_of_lanes<kLanes>(sum.value);
      const float inverse = sum.inverse();
      own.store(gRow[r], place[r], [&](int i) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) rE[i][e] *= inverse;
        return word_of<Element>(rE[i]);
      });
    }
  }
}

template <typename Element, int kLanes, int kItems, int kChecked>
__device__ __forceinline__ void softmax_rows_backward(const Element* gP, const Element* gGrad,
                                                      Element* gOut, int rows, int columns,
                                                      int words, float scale) {
  constexpr int kAbreast = 32 / kLanes;
  using Row = RowOfWords<Element, kLanes, kItems, kChecked>;
  const int lane = threadIdx.x % 32;
  const Row own{columns, words, lane % kLanes};
#pragma unroll 1
  for (int first = 0; first < rows; first += kAbreast) {
    const int row = first + lane / kLanes;
    const int64_t begin = static_cast<int64_t>(row < rows ? row : rows - 1) * columns;
    const auto place = own.place(gP + begin, row < rows);
    uint32_t rP[kItems], rGrad[kItems];
    typename Row::Loose loose_p, loose_grad;
    own.load(gP + begin, place, 0, rP, loose_p);
    own.load(gGrad + begin, place, 0, rGrad, loose_grad);
    own.join(place, loose_p, rP);
    own.join(place, loose_grad, rGrad);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) add_products<Element>(sum, rP[i], rGrad[i]);
    sum = sum_of_lanes<kLanes>(sum);
    own.store(gOut + begin, place, [&](int i) {
      return gradient_word<Element>(rP[i], rGrad[i], scale, [&](int) { return sum; });
    });
  }
}

// How a warp takes rows: the lanes that share one, the words of a lane, of which the last kChecked
// may be missing or loose, and how many times 32 / kLanes rows are loaded before the first is
// computed.
template <int kLanes_, int kItems_, int kChecked_, int kAtOnce_>
struct RowShape {
  static constexpr int kLanes = kLanes_, kItems = kItems_, kChecked = kChecked_, kAtOnce = kAtOnce_;
};

// With the fewest lanes and words that a row needs.
template <typename Config>
__device__ __forceinline__ void softmax_short_rows_by_words(const typename Config::Element* gX,
                                                            const typename Config::Element* gGrad,
                                                            typename Config::Element* gOut,
                                                            int rows, int columns, float scale) {
  using Element = typename Config::Element;
  constexpr int kPer = kPerWord<Element>;
  const int words = (columns + kPer - 1) / kPer;
  const auto take = [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Config::kBackward) {
      softmax_rows_backward<Element, Shape::kLanes, Shape::kItems, Shape::kChecked>(
          gX, gGrad, gOut, rows, columns, words, scale);
    } else {
      // What is staged is there at once.
      constexpr int kAtOnce = Config::kStaged ? 1 : Shape::kAtOnce;
      softmax_rows<Element, Shape::kLanes, Shape::kItems, Shape::kChecked, kAtOnce,
                   Config::kStaged>(gX, gOut, rows, columns, words, scale);
    }
  };
  if (words <= 64) {
    if (words <= 8) {
      take(RowShape<1, 8, 8, 1>());
    } else if (words <= 16) {
      take(RowShape<2, 8, 4, 2>());
    } else if (words <= 32) {
      take(RowShape<4, 8, 4, 2>());
    } else if (words <= 48) {
      take(RowShape<8, 6, 2, 2>());
    } else {
      take(RowShape<8, 8, 2, 2>());
    }
  } else if (words <= 128) {
    if (words <= 80) {
      take(RowShape<16, 5, 1, 2>());
    } else if (words <= 96) {
      take(RowShape<16, 6, 1, 2>());
    } else if (words <= 112) {
      take(RowShape<16, 7, 1, 2>());
    } else {
      take(RowShape<16, 8, 1, 2>());
    }
  } else if (words <= 192) {
    if (words <= 160) {
      take(RowShape<32, 5, 1, 2>());
    } else {
      take(RowShape<32, 6, 1, 2>());
    }
  } else if (words <= 224) {
    take(RowShape<32, 7, 1, 2>());
  } else if (words <= 384) {
    take(RowShape<32, 12, 5, 1>());
  } else if constexpr (kPer == 1 && !Config::kBackward) {
    take(RowShape<32, 24, 12, 1>());
  }
}

}  // namespace jagged_cuda::softmax
