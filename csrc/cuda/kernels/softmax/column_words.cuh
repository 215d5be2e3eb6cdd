// jagged2_softmax over the rows of each column, by words of 4 bytes in registers (softmax/lines.cuh:
// the mathematics; softmax/words.cuh).
//
// Grid: a CTA for each tile of kTile elements of the vector (find_matrix_tile). The CTAs of a matrix
// share out its strips of columns in turn. In a strip warp w takes rows w, w + kWarps, ..., whose
// words all begin at the same half: lane l keeps the words of columns 2 l - 1 and 2 l, or 2 l and
// 2 l + 1, of all its rows. Half a word at a strip's edge belongs to another strip or row: it is
// neither used nor written.
//
// Shared memory: maxima, then sums, of each warp for each column. Barriers: the tile is found; all
// maxima are there; all sums are there, and every warp has read the maxima.
//
// Matrices of more than kMaxRows rows are read three times by elements, and those of more than
// kMaxShort by the whole CTA (long_lines.cuh).
//
// Elements outside every matrix, and those of one that does not fit, become zeros.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma.cuh"
#include "cuda/kernels/softmax/spans.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_, int kWarps_, int kCtas_, int kBuffer_>
struct ColumnWordsConfig {
  static constexpr int kBuffer = kBuffer_;  // bytes of a whole matrix in shared memory; 0: none
  using Element = Element_;
  static constexpr bool kBackward = kBackward_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtas = kCtas_;
  static constexpr int kMaxRows = 256;
  static constexpr int kWords = kMaxRows / kWarps;  // of a thread
  static constexpr int kPer = kPerWord<Element>;
  static constexpr int kStrip = kPer == 2 ? 62 : 32;  // columns
  static constexpr int kTileLog2 = kBuffer > 0 ? 15 : 13;
  static constexpr int kLongThreads = 128;
  // What long_lines.cuh wants to know
  static constexpr bool kByWindows = false;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kItems = kBackward ? 16 : 24;
  static constexpr int kMaxShort = 32 * kItems;
  static constexpr int kLineSets = 1;
};

template <typename Config>
struct LongColumns : Config {
  static constexpr int kThreads = Config::kLongThreads;
  static constexpr int kWarps = kThreads / 32;
};

template <typename Config>
struct ColumnWordsShared {
  float maximum[Config::kWarps][64];
  uint32_t sum[Config::kWarps][64];
  JaggedTile tile;
  uint64_t loaded;  // barrier
};

// The words of a thread: kWarps rows apart.
template <typename Config>
struct ColumnOfWords {
  using Element = typename Config::Element;
  static constexpr int kPer = Config::kPer, kWords = Config::kWords;
  static constexpr int kGroup = 4;  // words that are skipped together
  int64_t first;  // the first word's first element, which may be another row's
  int64_t step;   // from word to word
  int count;      // words of this thread
  int rows;       // of the matrix
  int column;     // of the strip: the word's first
  bool has[2];    // whether the strip has these columns

  __device__ __forceinline__ bool whole() const { return has[0] && has[1]; }

  // What visit(i) defines, define(i) must define where it is skipped: else its registers would be kept
  // from before.
  template <typename Visit, typename Define>
  __device__ __forceinline__ void for_each(Visit visit, Define define) const {
#pragma unroll
    for (int group = 0; group < kWords; group += kGroup) {
      if (group * Config::kWarps < rows) {
#pragma unroll
        for (int i = group; i < group + kGroup; ++i) visit(i);
      } else {
#pragma unroll
        for (int i = group; i < group + kGroup; ++i) define(i);
      }
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    for_each(visit, [](int) {});
  }

  // The distance of words in bytes. Unknown to the compiler, which would keep all addresses.
  __device__ __forceinline__ int64_t step_bytes() const {
    int64_t bytes = step * static_cast<int>(sizeof(Element));
    asm volatile("" : "+l"(bytes));
    return bytes;
  }

  // At the vector's ends half a word may lie outside.
  __device__ __forceinline__ void load(const Element* gX, uint32_t neutral, bool at_end,
                                       uint32_t (&rX)[kWords]) const {
    const char* gWord = reinterpret_cast<const char*>(gX + first);
    const int64_t bytes = step_bytes();
    if (kPer == 1 || !at_end) {
      const uint32_t keep = (has[0] ? 0xffffu : 0u) | (has[1] ? 0xffff0000u : 0u);
      for_each([&](int i) {
        rX[i] = neutral;
        ptx::ld_global_nc_4(rX[i], gWord, i, count);
        gWord += bytes;
      }, [&](int i) { rX[i] = 0; });
      if constexpr (kPer == 2) {
        for_each([&](int i) { rX[i] = (rX[i] & keep) | (neutral & ~keep); });
      }
    } else {
      for_each([&](int i) {
        uint32_t low = neutral & 0xffff, high = low;
        ptx::ld_global_nc_2(low, gWord, i, has[0] ? count : 0);
        ptx::ld_global_nc_2(high, gWord + 2, i, has[1] ? count : 0);
        rX[i] = low | high << 16;
        gWord += bytes;
      }, [&](int i) { rX[i] = 0; });
    }
  }

  // Stores word_of(i) of each word.
  template <typename WordOf>
  __device__ __forceinline__ void store(Element* gOut, WordOf word_of) const {
    char* gWord = reinterpret_cast<char*>(gOut + first);
    const int64_t bytes = step_bytes();
    const bool is_whole = kPer == 1 || whole();
    const int shift = has[0] ? 0 : 16;
    if (!is_whole) gWord += shift / 8;
    const int wholes = is_whole ? count : 0, halves = is_whole ? 0 : count;
    for_each([&](int i) {
      const uint32_t word = word_of(i);
      ptx::st_global_4(gWord, word, i, wholes);
      if constexpr (kPer == 2) ptx::st_global_2(gWord, word >> shift, i, halves);
      gWord += bytes;
    });
  }
};

template <typename Config>
__device__ __forceinline__ ColumnOfWords<Config> column_of_words(
    const typename Config::Element* gX, const Matrix& matrix, int first_column, int width) {
  constexpr int kPer = Config::kPer;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ColumnOfWords<Config> own;
  own.rows = static_cast<int>(matrix.rows.len);
  const int64_t begin = matrix.begin + warp * matrix.columns.len + first_column;
  own.column = kPer * lane;
  if (kPer == 2 && reinterpret_cast<uintptr_t>(gX + begin) % 4 != 0) --own.column;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    own.has[e] = e < kPer && own.column + e >= 0 && own.column + e < width;
  }
  own.first = begin + own.column;
  own.step = matrix.columns.len * Config::kWarps;
  own.count = own.has[0] || own.has[1]
                  ? (own.rows - warp + Config::kWarps - 1) / Config::kWarps
                  : 0;
  return own;
}

template <typename Config>
__device__ __forceinline__ void softmax_strip(const typename Config::Element* gX,
                                              typename Config::Element* gOut,
                                              const ColumnOfWords<Config>& own, bool at_end,
                                              float exponent, ColumnWordsShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer, kWarps = Config::kWarps;
  const int warp = threadIdx.x / 32;
  const Scale<float> scale{exponent};
  uint32_t rX[Config::kWords];
  own.load(gX, kMinusInfinities<Element>, at_end, rX);
  uint32_t largest_word = kMinusInfinities<Element>;
  own.for_each([&](int i) { largest_word = largest_of_words<Element>(largest_word, rX[i]); });
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    if (own.has[e]) shared.maximum[warp][own.column + e] = element_of<Element>(largest_word, e);
  }
  __syncthreads();  // all maxima are there
  float maximum[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    const int column = own.has[e] ? own.column + e : 0;
    maximum[e] = shared.maximum[0][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      maximum[e] = ptx::max_nan(maximum[e], shared.maximum[w][column]);
    }
    maximum[e] = shift_of(maximum[e]);
  }
  float rE[Config::kWords][kPer];
  SumOfExponentials<Element> sum[kPer];
  own.for_each([&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      rE[i][e] = scale.exponential(element_of<Element>(rX[i], e), maximum[e]);
      sum[e].add(rE[i][e]);
    }
  }, [&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) rE[i][e] = 0;
  });
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    if (own.has[e]) {
      reinterpret_cast<decltype(sum[e].value)&>(shared.sum[warp][own.column + e]) = sum[e].value;
    }
  }
  __syncthreads();  // all sums are there, and every warp has read the maxima
  float inverse[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    const int column = own.has[e] ? own.column + e : 0;
    SumOfExponentials<Element> all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      all.value += reinterpret_cast<decltype(all.value)&>(shared.sum[w][column]);
    }
    inverse[e] = all.inverse();
  }
  own.store(gOut, [&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) rE[i][e] *= inverse[e];
    return word_of<Element>(rE[i]);
  });
}

template <typename Config>
__device__ __forceinline__ void softmax_strip_backward(const typename Config::Element* gP,
                                                       const typename Config::Element* gGrad,
                                                       typename Config::Element* gOut,
                                                       const ColumnOfWords<Config>& own,
                                                       bool at_end, float scale,
                                                       ColumnWordsShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer, kWarps = Config::kWarps;
  const int warp = threadIdx.x / 32;
  uint32_t rP[Config::kWords], rGrad[Config::kWords];
  own.load(gP, 0, at_end, rP);
  own.load(gGrad, 0, at_end, rGrad);
  float sum[kPer] = {};
  own.for_each([&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      sum[e] = fmaf(element_of<Element>(rP[i], e), element_of<Element>(rGrad[i], e), sum[e]);
    }
  });
  __syncthreads();  // every warp has read the sums of the strip before
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    if (own.has[e]) shared.maximum[warp][own.column + e] = sum[e];
  }
  __syncthreads();  // all sums are there
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    const int column = own.has[e] ? own.column + e : 0;
    sum[e] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum[e] += shared.maximum[w][column];
  }
  own.store(gOut, [&](int i) {
    float rOut[kPer];
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      rOut[e] =
          scale * element_of<Element>(rP[i], e) * (element_of<Element>(rGrad[i], e) - sum[e]);
    }
    return word_of<Element>(rOut);
  });
}

// Columns of up to kMaxShort elements, read three times: 64 threads beside each other along a row, which
// take the rows in turn with the others.
template <typename Config>
__device__ __noinline__ void softmax_tall_columns(const typename Config::Element* gX,
                                                  typename Config::Element* gOut, int rows,
                                                  int64_t columns, int64_t column, int width,
                                                  float exponent,
                                                  ColumnWordsShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kGroups = Config::kThreads / 64;
  const Scale<float> scale{exponent};
  const int own = threadIdx.x % 64, group = threadIdx.x / 64;
  const bool exists = own < width;
  const int64_t begin = group * columns + column + (exists ? own : 0);
  const Element* gColumn = gX + begin;
  Element* gResult = gOut + begin;
  const int count = exists && group < rows ? divide_up(rows - group, kGroups) : 0;
  columns *= kGroups;
  float maximum = minus_infinity<float>();
#pragma unroll 8
  for (int i = 0; i < count; ++i) maximum = ptx::max_nan(maximum, to_sum(gColumn[i * columns]));
  shared.maximum[group][own] = maximum;
  __syncthreads();  // all maxima are there
#pragma unroll
  for (int g = 0; g < kGroups; ++g) maximum = ptx::max_nan(maximum, shared.maximum[g][own]);
  maximum = shift_of(maximum);
  SumOfExponentials<Element> sum;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    sum.add(scale.exponential(to_sum(gColumn[i * columns]), maximum));
  }
  if constexpr (SumOfExponentials<Element>::kInteger) {
    sum.value -= static_cast<uint32_t>(count) << 30;
  }
  reinterpret_cast<decltype(sum.value)&>(shared.sum[group][own]) = sum.value;
  __syncthreads();  // all sums are there, and every thread has read the maxima
  sum.value = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    sum.value += reinterpret_cast<decltype(sum.value)&>(shared.sum[g][own]);
  }
  const float inverse = sum.inverse();
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    gResult[i * columns] = from_sum<Element>(
        scale.exponential(to_sum(gColumn[i * columns]), maximum) * inverse);
  }
}

// A span of the vector in shared memory: element `global` of the vector has the same place within 16
// bytes in both. Whole chunks of 16 bytes come and go as one piece, the elements at the vector's ends by
// hand.
template <typename Element>
struct SpanInShared {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  char* shared;  // of the first element
  int64_t begin, elems, capacity;

  // The buffer has room for a chunk before and behind the span.
  __device__ __forceinline__ SpanInShared(char* buffer, const Element* gX, int64_t begin,
                                          int64_t elems, int64_t capacity)
      : shared(buffer + reinterpret_cast<uintptr_t>(gX + begin) % 16),
        begin(begin),
        elems(elems),
        capacity(capacity) {}

  // One thread: starts the copy of what lies in chunks within the vector.
  __device__ __forceinline__ void load(const Element* gX, uint64_t& loaded) const {
    const char* gBegin = low(gX);
    const int bytes = static_cast<int>(high(gX) - gBegin);
    ptx::mbarrier_arrive_expect_tx(loaded, bytes > 0 ? bytes : 0);
    if (bytes > 0) ptx::cp_async_bulk(at(gX, gBegin), gBegin, bytes, loaded);
  }

  // 32 threads: copies the elements of the vector's first and last chunk, if these are cut.
  __device__ __forceinline__ void load_ends(const Element* gX, int lane) const {
    const Element* gFirst = gX + begin;
    for (int64_t i = lane; gFirst + i < gX + begin + elems && as_bytes(gFirst + i) < low(gX);
         i += 32) {
      reinterpret_cast<Element*>(shared)[i] = gFirst[i];
    }
    const char* gHigh = high(gX) > low(gX) ? high(gX) : low(gX);
    const int64_t first = (gHigh - as_bytes(gFirst)) / static_cast<int>(sizeof(Element));
    for (int64_t i = (first > 0 ? first : 0) + lane; i < elems; i += 32) {
      reinterpret_cast<Element*>(shared)[i] = gFirst[i];
    }
  }

  // One thread: stores the whole chunks, as part of its bulk group.
  __device__ __forceinline__ void store(Element* gOut) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(gOut + begin),
                    last = reinterpret_cast<uintptr_t>(gOut + begin + elems);
    const uintptr_t inner = (first + 15) & ~uintptr_t{15}, end = last & ~uintptr_t{15};
    if (inner < end) {
      ptx::cp_async_bulk_store(reinterpret_cast<void*>(inner), shared + (inner - first),
                               static_cast<int>(end - inner));
    }
  }

  // 32 threads: stores the elements before and behind the whole chunks.
  __device__ __forceinline__ void store_ends(Element* gOut, int lane) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(gOut + begin),
                    last = reinterpret_cast<uintptr_t>(gOut + begin + elems);
    const uintptr_t inner = (first + 15) & ~uintptr_t{15}, end = last & ~uintptr_t{15};
    const uintptr_t element =
        (lane < 16 ? first & ~uintptr_t{15} : (last & ~uintptr_t{15})) +
        lane % 16 * sizeof(Element);
    if (lane % 16 >= kChunk || element < first || element >= last) return;
    if (lane < 16 ? element < inner : end >= inner && element >= end) {
      *reinterpret_cast<Element*>(element) =
          *reinterpret_cast<const Element*>(shared + (element - first));
    }
  }

 private:
  static __device__ __forceinline__ const char* as_bytes(const Element* g) {
    return reinterpret_cast<const char*>(g);
  }
  // Where the chunks begin that lie in the vector, and where they end.
  __device__ __forceinline__ const char* low(const Element* gX) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(gX + begin) & ~uintptr_t{15};
    const uintptr_t vector = (reinterpret_cast<uintptr_t>(gX) + 15) & ~uintptr_t{15};
    return reinterpret_cast<const char*>(first > vector ? first : vector);
  }
  __device__ __forceinline__ const char* high(const Element* gX) const {
    const uintptr_t last = (reinterpret_cast<uintptr_t>(gX + begin + elems) + 15) & ~uintptr_t{15};
    const uintptr_t vector = reinterpret_cast<uintptr_t>(gX + capacity) & ~uintptr_t{15};
    return reinterpret_cast<const char*>(last < vector ? last : vector);
  }
  __device__ __forceinline__ void* at(const Element* gX, const char* g) const {
    return shared + (g - as_bytes(gX + begin));
  }
};

// The columns of a whole matrix in shared memory, in place. Strips of up to kStrip columns are shared
// out to the warps, kGroups of which take the rows of one in turn.
template <typename Config>
__device__ __forceinline__ void softmax_in_shared(char* sX, int rows, int columns, float exponent,
                                                  ColumnWordsShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer, kWarps = Config::kWarps, kUnroll = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Scale<float> scale{exponent};
  const int strips = divide_up(columns, Config::kStrip);
  const int width = (divide_up(columns, strips) + 1) & ~1;
  int groups = kWarps;  // that share a strip, a power of two, at least 2
  while (groups > 2 && kWarps / groups < strips) groups /= 2;
  const int abreast = kWarps / groups, group = warp % groups;
#pragma unroll 1
  for (int first = 0; first < strips; first += abreast) {
    const int strip = first + warp / groups;
    const int begin = strip * width, left = columns - begin;
    const int taken = left < width ? left : width;  // not positive: this warp has no strip
    // As rows of a group are an even number apart, they all begin in the same half of a word.
    char* sFirst = sX + (group * columns + begin) * static_cast<int>(sizeof(Element));
    int column = kPer * lane;
    if (kPer == 2 && reinterpret_cast<uintptr_t>(sFirst) % 4 != 0) --column;
    bool has[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) has[e] = e < kPer && column + e >= 0 && column + e < taken;
    const bool any = has[0] || has[1];
    const uint32_t word =
        ptx::shared_address(sFirst) + (any ? column : 0) * static_cast<int>(sizeof(Element));
    const uint32_t step = groups * columns * static_cast<int>(sizeof(Element));
    const int count = any && group < rows ? divide_up(rows - group, groups) : 0;

    uint32_t largest_word = kMinusInfinities<Element>;
    uint32_t at = word;
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i, at += step) {
      largest_word = largest_of_words<Element>(largest_word, ptx::ld_shared_4(at));
    }
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (has[e]) shared.maximum[warp][column + e] = element_of<Element>(largest_word, e);
    }
    __syncthreads();  // all maxima are there
    float maximum[kPer];
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      const int own = has[e] ? column + e : 0;
      maximum[e] = minus_infinity<float>();
#pragma unroll 4
      for (int g = 0; g < groups; ++g) {
        maximum[e] = ptx::max_nan(maximum[e], shared.maximum[warp - group + g][own]);
      }
      maximum[e] = shift_of(maximum[e]);
    }
    SumOfExponentials<Element> sum[kPer];
    at = word;
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i, at += step) {
      const uint32_t pair = ptx::ld_shared_4(at);
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        sum[e].add(scale.exponential(element_of<Element>(pair, e), maximum[e]));
      }
    }
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if constexpr (SumOfExponentials<Element>::kInteger) {
        sum[e].value -= static_cast<uint32_t>(count) << 30;
      }
      if (has[e]) {
        reinterpret_cast<decltype(sum[e].value)&>(shared.sum[warp][column + e]) = sum[e].value;
      }
    }
    __syncthreads();  // all sums are there, and every warp has read the maxima
    float inverse[kPer];
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      const int own = has[e] ? column + e : 0;
      SumOfExponentials<Element> all;
#pragma unroll 4
      for (int g = 0; g < groups; ++g) {
        all.value += reinterpret_cast<decltype(all.value)&>(shared.sum[warp - group + g][own]);
      }
      inverse[e] = all.inverse();
    }
    const bool is_whole = kPer == 1 || (has[0] && has[1]);
    const int shift = has[0] ? 0 : 16;
    at = word;
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i, at += step) {
      const uint32_t pair = ptx::ld_shared_4(at);
      float result[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        result[e] =
            scale.exponential(element_of<Element>(pair, e), maximum[e]) * inverse[e];
      }
      const uint32_t packed = word_of<Element>(result);
      if (is_whole) {
        ptx::st_shared_4(at, packed);
      } else {
        ptx::st_shared_2(at + shift / 8, packed >> shift);
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void softmax_whole_matrix(const typename Config::Element* gX,
                                                     typename Config::Element* gOut,
                                                     const Matrix& matrix, int64_t capacity,
                                                     float exponent,
                                                     ColumnWordsShared<Config>& shared) {
  extern __shared__ __align__(16) char buffer[];
  const int rows = static_cast<int>(matrix.rows.len),
            columns = static_cast<int>(matrix.columns.len);
  const SpanInShared<typename Config::Element> span(buffer, gX, matrix.begin, rows * columns,
                                                    capacity);
  if (threadIdx.x == 0) span.load(gX, shared.loaded);
  if (threadIdx.x < 32) span.load_ends(gX, threadIdx.x);
  ptx::mbarrier_wait(shared.loaded, 0);
  __syncthreads();  // the vector's ends are there
  softmax_in_shared<Config>(span.shared, rows, columns, exponent, shared);
  ptx::fence_proxy_async();
  __syncthreads();  // all results are there
  if (threadIdx.x == 0) {
    span.store(gOut);
    ptx::cp_async_bulk_commit();
  }
  if (threadIdx.x >= Config::kThreads - 32) span.store_ends(gOut, threadIdx.x % 32);
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_read();
}

template <typename Params>
struct ColumnWordsLaunch {
  Params params;
};

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kCtas) void column_words_kernel(
    const __grid_constant__ ColumnWordsLaunch<Params> launch) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  constexpr double kLog2E = 1.4426950408889634;
  __shared__ ColumnWordsShared<Config> shared;
  const Params& params = launch.params;
  const MatricesView& matrices = params.matrices;
  if (threadIdx.x < 32) {
    const JaggedTile found =
        find_matrix_tile(elements_of(matrices), Config::kTileLog2, blockIdx.x);
    if (threadIdx.x == 0) {
      shared.tile = found;
      if constexpr (Config::kBuffer > 0) {
        ptx::mbarrier_init(shared.loaded, 1);
        ptx::fence_mbarrier_init();
      }
    }
  }
  __syncthreads();  // the tile is found
  const JaggedTile tile = shared.tile;
  if (tile.row >= tile.rows.len) return;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
  constexpr int64_t kTile = int64_t{1} << Config::kTileLog2;
  const Matrix matrix = tile.seq < 0 ? Matrix{} : find_matrix(matrices, tile.seq);
  if (!matrix.fits) {
    const int64_t left = tile.rows.len - tile.row;
    store_zeros(gOut + tile.rows.begin + tile.row, left < kTile ? left : kTile, threadIdx.x,
                Config::kThreads);
    return;
  }
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len;
  if (rows == 0 || columns == 0) return;  // with wrong offsets alone
  const auto scale = static_cast<float>(params.scale * (Config::kBackward ? 1 : kLog2E));
  if constexpr (Config::kBuffer > 0) {
    constexpr int64_t kFits = Config::kBuffer / static_cast<int>(sizeof(Element));
    if (rows <= Config::kMaxShort && rows * columns <= kFits) {
      if (tile.row == 0) {
        softmax_whole_matrix<Config>(gX, gOut, matrix, matrices.capacity, scale, shared);
      }
      return;
    }
  }
  const int64_t tiles = (tile.rows.len + kTile - 1) >> Config::kTileLog2;
  const int64_t strips = divide_up(columns, int64_t{Config::kStrip});
  const int width = (static_cast<int>(divide_up(columns, strips)) + 1) & ~1;
  const bool at_end =
      matrix.begin == 0 || matrix.begin + rows * columns == matrices.capacity;
#pragma unroll 1
  for (int64_t strip = tile.row >> Config::kTileLog2; strip * width < columns; strip += tiles) {
    const int64_t column = strip * width, left = columns - column;
    const int taken = left < width ? static_cast<int>(left) : width;
    if (rows > Config::kMaxRows) {
      if (Config::kBackward || rows > Config::kMaxShort) {
        // By as many threads as in the kernel by tiles, which adds in the same order.
        if (threadIdx.x >= Config::kLongThreads) return;
        const int64_t begin = matrix.begin + column;
        softmax_long_lines<LongColumns<Config>>(
            Place<Element, int64_t>{gX + begin, gGrad + begin, gOut + begin, 1.0f}, true, 0, taken,
            rows, 1, columns, lanes_of_long_lines(columns, true), Scale<float>{scale});
      } else if constexpr (!Config::kBackward) {
        softmax_tall_columns<Config>(gX + matrix.begin, gOut + matrix.begin,
                                     static_cast<int>(rows), columns, column, taken, scale, shared);
      }
      continue;
    }
    const auto own = column_of_words<Config>(gX, matrix, static_cast<int>(column), taken);
    if constexpr (Config::kBackward) {
      softmax_strip_backward(gX, gGrad, gOut, own, at_end, scale, shared);
    } else {
      softmax_strip(gX, gOut, own, at_end, scale, shared);
    }
  }
}

template <typename Element, int kWarps, int kCtas, int kBuffer, typename Params>
cudaError_t launch_column_words(const Params& params, cudaStream_t stream) {
  using Config = ColumnWordsConfig<Element, Operands<Params>::kBackward, kWarps, kCtas, kBuffer>;
  constexpr auto kKernel = column_words_kernel<Config, Params>;
  constexpr const char* kPath = Config::kBackward ? "cuda.jagged2_softmax_backward.rows.words"
                                                  : "cuda.jagged2_softmax.rows.words";
  const int64_t tiles = num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs,
                                  1 << Config::kTileLog2);
  return launch<kKernel>(ColumnWordsLaunch<Params>{params}, {tiles}, Config::kThreads,
                         kBuffer > 0 ? kBuffer + 32 : SpanShared<Config>::bytes(Config::kChunk), stream,
                         kPath);
}

}  // namespace jagged_cuda::softmax
