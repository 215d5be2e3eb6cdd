// jagged2_softmax over the columns of each row, by words of 4 bytes in registers
// (softmax/lines.cuh: the mathematics; softmax/words.cuh).
//
// Grid: as many CTAs as the GPU holds, or a few times as many. Each warp takes an equal share of the vector's elements: the
// rows that begin there, of one matrix after another. kLanes lanes share a row, so that a warp
// computes 32 / kLanes rows abreast, each lane up to kItems words of its row, kLanes words apart.
//
// A row of 16-bit elements begins in the low or the high half of a word. It has ceil(columns / 2)
// words in either case, the last of which is *loose* if the row does not fill its words: its low
// half is the row's first element, if that lies in a high half, and its high half the row's last
// element, if that lies in a low half. The other words are whole, and no element of another row is
// touched.
//
// *Staged* (compute capability 9.0), a warp's share is brought to its own shared memory by one bulk copy,
// which starts before the warp knows its matrices. Rows that end too far behind the share, those in chunks
// that are not whole at the vector's ends, and those longer than kMaxWords are read as they lie.
//
// Rows longer than kMaxWords are read three times, backward twice, by a warp, and those longer than
// kMaxWarpWords by the whole CTA at the end (long_lines.cuh). Barriers: whether there are any of
// these; those of long_lines.cuh, which works where shares were staged; `arrived` of each warp, on which
// its copy completes.
//
// Elements outside every matrix, and those of one that does not fit, become zeros.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/softmax/long_lines.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_, bool kStaged_ = false>
struct RowWordsConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_, kStaged = kStaged_;
  static_assert(!kStaged || !kBackward);
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtas = 6;  // per SM: 80 registers
  // Of a row that lanes keep: 32 lanes with 12 words, or forward 24 of floats
  static constexpr int kMaxWords = sizeof(Element) == 2 || kBackward ? 384 : 768;
  // Of a row that one warp takes: a lane then adds at most 1,022 exponentials as integers. Each is off
  // by up to 2^-23, all of them to one side if they are alike, which f16 bears of 8,192.
  static constexpr int kMaxWarpWords =
      std::is_same_v<Element, __half> && !kBackward ? 4'096 : 16'320;
  static constexpr int kMinElems = 512;      // of a warp's share
  static constexpr int kWaveElems = 10'000;  // about as many, if there are more in 16 bits
  // Staged, of a warp; six CTAs have 37,888 bytes each. What is copied behind a share whose last row
  // is not known yet
  static constexpr int kStageBytes = 9'344, kBehind = 256;
  static constexpr int kStage = kStageBytes / static_cast<int>(sizeof(Element));
  // What long_lines.cuh wants to know
  static constexpr bool kByWindows = false;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kItems = 16;
  static constexpr int kMaxShort = 32 * kItems;
  static constexpr int kLineSets = 1;
};

// The last matrix that begins before `element`, or -1. All 32 lanes of a warp together.
__device__ __forceinline__ int64_t last_matrix_before(const MatricesView& matrices,
                                                      int64_t element) {
  const int lane = threadIdx.x % 32;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  int64_t low = -1, high = matrices.rows.num_seqs + 1;  // begins before it; begins not before it
  while (high - low > 1) {
    const int64_t step = (high - low + 31) >> 5, probe = low + step * (lane + 1);
    const bool before = probe < high && __ldg(gOffsets + probe) < element;
    // With wrong offsets others may follow the first that is not before it.
    const unsigned stopped = ~__ballot_sync(kAllLanes, before);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    low += step * passed;
    high = high < low + step ? high : low + step;
  }
  return low;
}

// What a share of the vector has of one matrix.
struct PartOfShare {
  int64_t begin;  // the first element of the first row that begins in the share
  int64_t rows;   // 0: none
  int64_t columns;
  int64_t next;                    // where the next matrix begins
  int64_t zeros_begin, zeros_end;  // elements of a matrix that does not fit, or of none
};

// What [low, high) has of matrix `seq`; seq -1 is what lies before all matrices, seq B what lies
// behind them.
__device__ __forceinline__ PartOfShare part_of_share(const MatricesView& matrices, int64_t seq,
                                                     int64_t low, int64_t high) {
  const int64_t num_seqs = matrices.rows.num_seqs;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  PartOfShare part{0, 0, 0, matrices.capacity, 0, 0};
  if (seq > num_seqs) return part;
  Matrix matrix{};
  if (seq >= 0 && seq < num_seqs) matrix = find_matrix(matrices, seq);
  if (seq < num_seqs) part.next = __ldg(gOffsets + seq + 1);
  if (!matrix.fits) {
    const int64_t begin = seq >= 0 ? __ldg(gOffsets + seq) : 0;
    part.zeros_begin = begin > low ? begin : low;
    part.zeros_end = part.next < high ? part.next : high;
    return part;
  }
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len, elems = rows * columns;
  if (elems == 0 || matrix.begin >= high || matrix.begin + elems <= low) return part;
  const int64_t before = low - matrix.begin, until = high - matrix.begin;
  const int64_t first = before > 0 ? divide_up(before, columns) : 0;
  const int64_t end = until < elems ? divide_up(until, columns) : rows;
  part.begin = matrix.begin + first * columns;
  part.rows = end - first;
  part.columns = columns;
  return part;
}

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
      float maximum = element_of<Element>(largest_word, 0);
      if constexpr (kPer == 2) {
        maximum = ptx::max_nan(maximum, element_of<Element>(largest_word, 1));
      }
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        maximum = ptx::max_nan(maximum, __shfl_xor_sync(kAllLanes, maximum, step));
      }
      maximum = shift_of(maximum);
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
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        sum.value += __shfl_xor_sync(kAllLanes, sum.value, step);
      }
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
  constexpr int kPer = kPerWord<Element>, kAbreast = 32 / kLanes;
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
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        sum = fmaf(element_of<Element>(rP[i], e), element_of<Element>(rGrad[i], e), sum);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    own.store(gOut + begin, place, [&](int i) {
      float rOut[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        rOut[e] = scale * element_of<Element>(rP[i], e) * (element_of<Element>(rGrad[i], e) - sum);
      }
      return word_of<Element>(rOut);
    });
  }
}

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
    if constexpr (kPer == 2) ptx::ld_global_nc_2(half, gRow + end, -1, end);
    return kPer == 2 ? half | (kNeutral & 0xffff0000u) : kNeutral;
  }

  // A block of words from word `first` on.
  __device__ __forceinline__ void load(const Element* gRow, int first,
                                       uint32_t (&rX)[kBlock]) const {
    const int lane = threadIdx.x % 32;
    const Element* gWords = gRow + head + kPer * (first + lane);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      rX[i] = kNeutral;
      ptx::ld_global_nc_4(rX[i], gWords + 32 * kPer * i, first + lane + 32 * i, wholes);
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
};

// A row of up to kMaxWarpWords words, which a warp reads three times, or twice.
template <typename Config>
__device__ __noinline__ void softmax_row_by_warp(const typename Config::Element* gX,
                                                 const typename Config::Element* gGrad,
                                                 typename Config::Element* gOut, int columns,
                                                 float factor) {
  using Element = typename Config::Element;
  using Row = RowOfWarp<Element, Config::kBackward, Config::kStaged>;
  constexpr int kPer = Row::kPer, kBlock = Row::kBlock, kStep = 32 * kBlock;
  const Row row(gX, columns);
  const uint32_t end_x = row.load_end(gX);
  if constexpr (Config::kBackward) {
    const uint32_t end_grad = row.load_end(gGrad);
    const auto add = [](float& sum, uint32_t p, uint32_t grad) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        sum = fmaf(element_of<Element>(p, e), element_of<Element>(grad, e), sum);
      }
    };
    float sum = 0;
    uint32_t rP[kBlock], rGrad[kBlock];
#pragma unroll 1
    for (int first = 0; first < row.wholes; first += kStep) {
      row.load(gX, first, rP);
      row.load(gGrad, first, rGrad);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) add(sum, rP[i], rGrad[i]);
    }
    add(sum, end_x, end_grad);
    sum = combine_lanes(sum, 1, 32, [](float a, float b) { return a + b; });
    const auto result_of = [&](uint32_t p, uint32_t grad) {
      float result[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        result[e] = factor * element_of<Element>(p, e) * (element_of<Element>(grad, e) - sum);
      }
      return word_of<Element>(result);
    };
#pragma unroll 1
    for (int first = 0; first < row.wholes; first += kStep) {
      row.load(gX, first, rP);
      row.load(gGrad, first, rGrad);
      row.store(gOut, first, [&](int i) { return result_of(rP[i], rGrad[i]); });
    }
    if constexpr (kPer == 2)
      ptx::st_global_2(gOut + row.end, result_of(end_x, end_grad), -1, row.end);
  } else {
    const Scale<float> scale{factor};
    uint32_t largest_word = end_x;
    uint32_t rX[kBlock];
#pragma unroll 1
    for (int first = 0; first < row.wholes; first += kStep) {
      row.load(gX, first, rX);
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        largest_word = largest_of_words<Element>(largest_word, rX[i]);
    }
    float maximum = element_of<Element>(largest_word, 0);
    if constexpr (kPer == 2) {
      maximum = ptx::max_nan(maximum, element_of<Element>(largest_word, 1));
    }
    maximum = combine_lanes(maximum, 1, 32, [](float a, float b) { return ptx::max_nan(a, b); });
    maximum = shift_of(maximum);
    SumOfExponentials<Element> sum;
    const auto add = [&](uint32_t word) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        sum.add(scale.exponential(element_of<Element>(word, e), maximum));
      }
    };
#pragma unroll 1
    for (int first = 0; first < row.wholes; first += kStep) {
      row.load(gX, first, rX);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) add(rX[i]);
    }
    add(end_x);
    float inverse;
    if constexpr (SumOfExponentials<Element>::kInteger) {
      // Of all lanes there may be more than 32 bits. Terms of blocks are multiples of four.
      const unsigned long long own = sum.value - (static_cast<uint32_t>(kPer) << 30);
      const unsigned long long all = combine_lanes(
          own, 1, 32, [](unsigned long long a, unsigned long long b) { return a + b; });
      inverse = reciprocal(static_cast<float>(all) * 0x1p-22f);
    } else {
      inverse = reciprocal(combine_lanes(sum.value, 1, 32, [](float a, float b) { return a + b; }));
    }
    const auto result_of = [&](uint32_t word) {
      float result[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        result[e] = scale.exponential(element_of<Element>(word, e), maximum) * inverse;
      }
      return word_of<Element>(result);
    };
#pragma unroll 1
    for (int first = 0; first < row.wholes; first += kStep) {
      row.load(gX, first, rX);
      row.store(gOut, first, [&](int i) { return result_of(rX[i]); });
    }
    if constexpr (kPer == 2) ptx::st_global_2(gOut + row.end, result_of(end_x), -1, row.end);
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

// A warp's share, and what its last row may need behind it, in its shared memory.
template <typename Config>
struct ShareOnStage {
  using Element = typename Config::Element;
  const Element* sX = nullptr;
  int64_t begin = 0, end = 0;
  uint64_t* arrived = nullptr;

  __device__ __forceinline__ void load(const Element* gX, int64_t low, int64_t share,
                                       int64_t capacity) {
    if constexpr (Config::kStaged) {
      extern __shared__ __align__(16) unsigned char dynamic_shared[];
      __shared__ alignas(8) uint64_t all_arrived[Config::kWarps];
      unsigned char* sShare = dynamic_shared + threadIdx.x / 32 * Config::kStageBytes;
      sX = reinterpret_cast<const Element*>(sShare);
      if (low >= capacity) return;
      // Whole chunks of the vector
      begin = low - static_cast<int64_t>(reinterpret_cast<uintptr_t>(gX + low) / sizeof(Element) %
                                         Config::kChunk);
      if (begin < 0) begin += Config::kChunk;
      const int64_t last = low + share + Config::kBehind;
      const int elems = static_cast<int>((last < capacity ? last : capacity) - begin);
      const int bytes = elems / Config::kChunk * 16;
      end = begin + bytes / static_cast<int>(sizeof(Element));
      if (bytes <= 0) return;
      arrived = &all_arrived[threadIdx.x / 32];
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_init(*arrived, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(*arrived, bytes);
        ptx::cp_async_bulk(sShare, gX + begin, bytes, *arrived);
      }
      __syncwarp();  // the barrier is there
    }
  }
  __device__ __forceinline__ void wait() {
    if (Config::kStaged && arrived != nullptr) {
      ptx::mbarrier_wait(*arrived, 0);
      arrived = nullptr;
    }
  }
  // Where `count` elements from `first` on lie.
  __device__ __forceinline__ const Element* find(const Element* gX, int64_t first,
                                                 int64_t count) const {
    return Config::kStaged && first >= begin && first + count <= end ? sX + (first - begin)
                                                                     : gX + first;
  }
};

template <typename Params>
struct RowWordsLaunch {
  Params params;
  int64_t share;  // elements of a warp
};

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kCtas) void row_words_kernel(
    const __grid_constant__ RowWordsLaunch<Params> launch) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  constexpr double kLog2E = 1.4426950408889634;
  const Params& params = launch.params;
  const MatricesView& matrices = params.matrices;
  const int lane = threadIdx.x % 32;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
  const auto scale = static_cast<float>(params.scale * (Config::kBackward ? 1 : kLog2E));
  const int64_t first = int64_t{blockIdx.x} * Config::kWarps * launch.share;
  const int64_t low = first + threadIdx.x / 32 * launch.share;
  ShareOnStage<Config> stage;
  stage.load(gX, low, launch.share, matrices.capacity);

  // A pass over the share's matrices, 32 at a time; `long_ones` are computed by the CTA.
  bool any_long = false;
  const auto take_share = [&](int64_t low, int64_t high, bool long_ones) {
    if (high > matrices.capacity) high = matrices.capacity;
    if (low >= high) return;
#pragma unroll 1
    for (int64_t seq = last_matrix_before(matrices, low);; seq += 32) {
      const PartOfShare part = part_of_share(matrices, seq + lane, low, high);
      unsigned zeros = __ballot_sync(kAllLanes, part.zeros_begin < part.zeros_end && !long_ones);
#pragma unroll 1
      for (; zeros != 0; zeros &= zeros - 1) {
        const int owner = __ffs(static_cast<int>(zeros)) - 1;
        const int64_t begin = __shfl_sync(kAllLanes, part.zeros_begin, owner);
        const int64_t end = __shfl_sync(kAllLanes, part.zeros_end, owner);
        store_zeros(gOut + begin, end - begin, lane, 32);
      }
      const bool is_long = part.columns > int64_t{Config::kMaxWarpWords} * kPerWord<Element>;
      any_long |= is_long;
      unsigned left = __ballot_sync(kAllLanes, part.rows > 0 && is_long == long_ones);
      stage.wait();
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int owner = __ffs(static_cast<int>(left)) - 1;
        const int64_t begin = __shfl_sync(kAllLanes, part.begin, owner);
        const int64_t rows = __shfl_sync(kAllLanes, part.rows, owner);
        const int64_t columns = __shfl_sync(kAllLanes, part.columns, owner);
        if (long_ones) {
          softmax_long_lines<Config>(
              Place<Element, int64_t>{gX + begin, gGrad + begin, gOut + begin, 1.0f}, false, 0,
              static_cast<int>(rows), columns, columns, 1, 5, Scale<float>{scale});
        } else if (columns > Config::kMaxWords * kPerWord<Element>) {
#pragma unroll 1
          for (int64_t row = begin; row < begin + rows * columns; row += columns) {
            softmax_row_by_warp<Config>(gX + row, gGrad + row, gOut + row,
                                        static_cast<int>(columns), scale);
          }
        } else {
          softmax_short_rows_by_words<Config>(stage.find(gX, begin, rows * columns), gGrad + begin,
                                              gOut + begin, static_cast<int>(rows),
                                              static_cast<int>(columns), scale);
        }
      }
      if (__any_sync(kAllLanes, seq + lane >= matrices.rows.num_seqs || part.next >= high)) break;
    }
  };
  take_share(low, low + launch.share, false);
  if (__syncthreads_or(any_long)) take_share(first, first + Config::kWarps * launch.share, true);
}

template <typename Config, typename Params>
cudaError_t launch_row_words_of(const Params& params, int64_t share, cudaStream_t stream) {
  constexpr const char* kPath = Config::kBackward ? "cuda.jagged2_softmax_backward.columns.words"
                                : Config::kStaged ? "cuda.jagged2_softmax.columns.staged_words"
                                                  : "cuda.jagged2_softmax.columns.words";
  constexpr int kLongBytes = SpanShared<Config>::bytes(Config::kChunk);
  constexpr int kBytes = Config::kStaged ? Config::kWarps * Config::kStageBytes : kLongBytes;
  static_assert(kBytes >= kLongBytes);
  const int64_t of_cta = share * Config::kWarps;
  return launch<row_words_kernel<Config, Params>>(
      RowWordsLaunch<Params>{params, share}, {(params.matrices.capacity + of_cta - 1) / of_cta},
      Config::kThreads, kBytes, stream, kPath);
}

template <typename Element, typename Params>
cudaError_t launch_row_words(const Params& params, cudaStream_t stream) {
  constexpr bool kBackward = Operands<Params>::kBackward;
  using Config = RowWordsConfig<Element, kBackward>;
  int device = 0, num_sms = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  const int64_t warps = int64_t{num_sms} * Config::kCtas * Config::kWarps;
  int64_t share = (params.matrices.capacity + warps - 1) / warps;
  if (share < Config::kMinElems) share = Config::kMinElems;
  // Large batches in several waves: a warp whose share has long rows takes longer than others.
  if (const int64_t waves = (share + Config::kWaveElems / 2) / Config::kWaveElems;
      sizeof(Element) == 2 && waves > 1) {
    share = (share + waves - 1) / waves;
  }
  if constexpr (!kBackward && sizeof(Element) == 2) {
    using Staged = RowWordsConfig<Element, false, true>;
    if (has_wgmma() && share + Staged::kBehind + Staged::kChunk <= Staged::kStage) {
      return launch_row_words_of<Staged>(params, share, stream);
    }
  }
  return launch_row_words_of<Config>(params, share, stream);
}

}  // namespace jagged_cuda::softmax
