// jagged2_softmax over the rows of each column, large matrices: strips of columns whose words of 4 bytes
// stay on the SM (softmax/lines.cuh: the mathematics; softmax/words.cuh).
//
// A matrix is cut into strips of columns, so wide that all rows of one fit one CTA, or, of many rows, the
// CTAs of a cluster (*shared* strips), of which each takes a block of rows. Which, and how wide, follows
// from the matrix's shape alone.
//
// Grid: x, clusters of kCluster CTAs. Each CTA has a *window* of the vector, as many elements as any other,
// and each cluster those of its CTAs. Strip k of a matrix counts as if it began k * rows * width elements
// behind the matrix's begin: the CTA, or the cluster, in whose window that lies takes it. So a matrix is
// spread over as many CTAs as it has windows, wherever it begins.
//
// Threads of a CTA: kPer rows of a strip (two of 16-bit elements) are its words, one *unit*. A thread has one
// word of a unit and takes every `groups`-th unit, so that its words lie in the same columns, wherever rows
// begin: rows of an odd pitch begin in one half of a word and in the other by turns. A word at a strip's
// edge has an element of another strip, or of another matrix, in its other half: it is read, counts for
// nothing, and is not written.
//
//   copy own words to shared memory, where no other thread reads them
//   largest of own words        -> of the CTA -> of the cluster
//   sum of own exponentials     -> of the CTA -> of the cluster
//   exponentials once more, multiplied; store words
//
// Backward there is the sum of p dp alone. Forward sums are integers, so that they depend on nothing but
// the column; sums of p dp are added in an order that follows from the matrix's shape and, for an even
// number of columns, from whether its begin is odd.
//
// Shared memory: `words` of each thread, 64 KiB; a number for each thread and element of its word; of each
// column the CTA's number, twice, which the cluster reads, and the number of all.
// Barriers: __syncthreads where threads write for others; the cluster's between writing and reading the
// CTAs' numbers. These are two buffers: one is written again behind the barrier of the other, by which all
// have read it. A last one, so that no CTA ends while others read.
//
// Matrices of more than kMaxRows rows are computed from global memory (long_lines.cuh), 32 columns at a
// time. Elements outside every matrix, and those of one that does not fit the vector, become zeros.
#pragma once

#include "cuda/kernels/prim/cluster.cuh"
#include "cuda/kernels/prim/sm90a.cuh"
#include "cuda/kernels/softmax/long_lines.cuh"
#include "cuda/kernels/softmax/shares.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_>
struct StripConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_;
  static constexpr int kThreads = 256, kCluster = 8;
  static constexpr int kCtas = 3;  // per SM: 80 registers, 75 KiB
  static constexpr int kPer = kPerWord<Element>;
  static constexpr int kOperands = kBackward ? 2 : 1;
  static constexpr int kItems = 64 / kOperands, kGroup = 8;  // words of a thread; taken together
  // A unit has up to two words more than its elements fill.
  static constexpr int kEdge = kPer == 2 ? 2 : 0;
  // A CTA takes strips of fewer columns only if the matrix has no more.
  static constexpr int kMinWidth = 60;
  // Forward a CTA of a cluster then has 1,022 rows, whose exponentials fit 32 bits.
  static constexpr int kMaxRows = kMaxCountedTerms;
  // As the kernels by spans have them, so that a result does not depend on the kernel.
  static constexpr int kLongThreads = 128;
  using Long = SpanConfig<Element, kBackward, false, kLongThreads>;
  static constexpr uint32_t kNeutral = kBackward ? 0 : kMinusInfinities<Element>;
};

enum class StripsOf { kCta, kCluster, kLong };

// The strips of one matrix.
struct Strips {
  int64_t begin, rows, columns;
  int64_t first, end;  // those that are to be taken
  int width;
  StripsOf kind;
  int64_t zeros_begin, zeros_end;  // or elements of a matrix that does not fit, or of none
};

// Of 32 matrices.
struct StripsOf32 {
  Strips strips[32];
  unsigned of_cta, of_cluster, are_long, are_zeros;  // bits of matrices
  bool is_last;
};

template <typename Config>
struct StripShared {
  uint32_t words[Config::kOperands][Config::kItems][Config::kThreads];
  uint32_t partials[Config::kPer * Config::kThreads];
  uint32_t of_cta[2][Config::kThreads];  // of each column
  uint32_t of_all[Config::kThreads];
  StripsOf32 strips;
};

// How a matrix is cut, by its shape alone.
template <typename Config>
__device__ __forceinline__ void cut_strips(Strips& strips) {
  constexpr int kPer = Config::kPer, kUnits = kPer * Config::kItems;
  if (strips.rows > Config::kMaxRows) {
    strips.kind = StripsOf::kLong;
    strips.width = 32;
    return;
  }
  const int rows = static_cast<int>(strips.rows);
  const auto width_of = [](int rows) {
    const int groups = (rows + kUnits - 1) / kUnits;
    return (Config::kThreads / groups - Config::kEdge) / kPer * kPer;
  };
  int width = width_of(rows);
  strips.kind = StripsOf::kCta;
  if (width < Config::kMinWidth && width < strips.columns) {
    strips.kind = StripsOf::kCluster;
    width = width_of((rows + Config::kCluster - 1) / Config::kCluster + kPer - 1);
  }
  const int64_t count = divide_up(strips.columns, int64_t{width});
  strips.width = static_cast<int>((divide_up(strips.columns, count) + kPer - 1) / kPer * kPer);
}

// What matrix `seq` has in [low, high) of a CTA and in [all_low, all_high) of its cluster; seq -1 is what
// lies before all matrices, seq B what lies behind them.
template <typename Config>
__device__ __forceinline__ Strips find_strips(const MatricesView& matrices, int64_t seq,
                                              int64_t low, int64_t high, int64_t all_low,
                                              int64_t all_high, bool& is_last) {
  const int64_t num_seqs = matrices.rows.num_seqs;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  Strips strips{};
  is_last = seq >= num_seqs;
  if (seq > num_seqs) return strips;
  Matrix matrix{};
  if (seq >= 0 && seq < num_seqs) matrix = find_matrix(matrices, seq);
  const int64_t next = seq < num_seqs ? __ldg(gOffsets + seq + 1) : matrices.capacity;
  is_last |= next >= all_high;
  if (!matrix.fits) {
    const int64_t begin = seq >= 0 ? __ldg(gOffsets + seq) : 0;
    strips.zeros_begin = begin > low ? begin : low;
    strips.zeros_end = next < high ? next : high;
    return strips;
  }
  strips.begin = matrix.begin;
  strips.rows = matrix.rows.len;
  strips.columns = matrix.columns.len;
  if (strips.rows == 0 || strips.columns == 0) return strips;
  cut_strips<Config>(strips);
  const bool is_shared = strips.kind == StripsOf::kCluster;
  const int64_t elems = strips.rows * strips.width,
                before = (is_shared ? all_low : low) - matrix.begin,
                until = (is_shared ? all_high : high) - matrix.begin,
                count = divide_up(strips.columns, int64_t{strips.width});
  strips.first = before > 0 ? divide_up(before, elems) : 0;
  strips.end = until > 0 ? divide_up(until, elems) : 0;
  if (strips.end > count) strips.end = count;
  return strips;
}

// Plans what 32 matrices from `first_seq` on have in [low, high) of a CTA and in [all_low,
// all_high) of its cluster; a warp.
template <typename Config>
__device__ __forceinline__ void plan_strips(const MatricesView& matrices, int64_t first_seq,
                                            int64_t low, int64_t high, int64_t all_low,
                                            int64_t all_high, StripsOf32& batch) {
  const int lane = threadIdx.x % 32;
  bool is_last;
  const Strips own =
      find_strips<Config>(matrices, first_seq + lane, low, high, all_low, all_high, is_last);
  batch.strips[lane] = own;
  const bool any = own.first < own.end;
  const unsigned of_cta = __ballot_sync(kAllLanes, any && own.kind == StripsOf::kCta),
                 of_cluster = __ballot_sync(kAllLanes, any && own.kind == StripsOf::kCluster),
                 are_long = __ballot_sync(kAllLanes, any && own.kind == StripsOf::kLong),
                 are_zeros = __ballot_sync(kAllLanes, own.zeros_begin < own.zeros_end);
  is_last = __any_sync(kAllLanes, is_last);
  if (lane == 0) {
    batch.of_cta = of_cta;
    batch.of_cluster = of_cluster;
    batch.are_long = are_long;
    batch.are_zeros = are_zeros;
    batch.is_last = is_last;
  }
}

// A thread's words of a strip.
template <typename Config>
struct OwnOfStrip {
  using Element = typename Config::Element;
  static constexpr int kPer = Config::kPer, kGroup = Config::kGroup;
  int width, lines;     // lines: kPer for each group of threads
  int items;            // of all threads, a multiple of kGroup
  int count;            // of this thread
  int line;             // -1: none
  int column;           // of the word's first element; -1: of none
  bool has[kPer];       // whether the strip has the word's elements
  int64_t first, step;  // elements: the first word, from word to word

  __device__ __forceinline__ OwnOfStrip(int width, int rows, int64_t begin, int64_t columns,
                                        unsigned head)
      : width(width) {
    // The halves in which the first and the second row of a unit begin
    const auto head_at = [&](int64_t element) {
      return static_cast<int>((head + static_cast<unsigned>(element)) % kPer);
    };
    const int first_head = head_at(begin), second_head = head_at(begin + columns);
    const int words = (first_head + width + kPer - 1) / kPer;
    const int unit = kPer == 1 ? words : words + (second_head + width + 1) / 2;
    const int thread = static_cast<int>(threadIdx.x);
    const int groups = Config::kThreads / unit, group = thread / unit;
    int word = thread - group * unit;
    const bool is_second = word >= words;
    if (is_second) word -= words;
    const int row = kPer * group + is_second, units = (rows + kPer - 1) / kPer;
    column = kPer * word - (is_second ? second_head : first_head);
    lines = kPer * groups;
    line = group < groups ? row : -1;
    items = ((units + groups - 1) / groups + kGroup - 1) / kGroup * kGroup;
    count = group < groups && row < rows ? (rows - row + lines - 1) / lines : 0;
#pragma unroll
    for (int e = 0; e < kPer; ++e) has[e] = column + e >= 0 && column + e < width;
    first = begin + row * columns + column;
    step = lines * columns;
  }

  // The column of element `e`, or one that exists
  __device__ __forceinline__ int column_of(int e) const {
    return min(max(column + e, 0), width - 1);
  }

  // Starts the copies to this thread's words; those that it lacks are `neutral`.
  __device__ __forceinline__ void load(uint32_t (*sWords)[Config::kThreads], const Element* gX,
                                       int64_t capacity) const {
    const uint32_t own = ptx::shared_address(&sWords[0][threadIdx.x]);
    // A word that the vector's begin or its end cuts
    const bool is_cut = kPer == 2 && count > 0 && first < 0;
    const bool is_last_cut = kPer == 2 && count > 0 && first + (count - 1) * step + 1 >= capacity;
    const int begin = is_cut ? 1 : 0;
    const auto wholes = static_cast<unsigned>(count - is_last_cut - begin);
    const Element* gWord = gX + first;
#pragma unroll 1
    for (int block = 0; block < items; block += kGroup) {
      const uint32_t sBlock = own + block * (4 * Config::kThreads);
#pragma unroll
      for (int i = 0; i < kGroup; ++i, gWord += step) {
        const uint32_t sWord = sBlock + i * (4 * Config::kThreads);
        if (static_cast<unsigned>(block + i - begin) < wholes) {
          ptx::cp_async_4(sWord, gWord, 4);
        } else {
          ptx::st_shared_4(sWord, Config::kNeutral);
        }
      }
    }
    if constexpr (kPer == 2) {
      const auto* gHalves = reinterpret_cast<const unsigned short*>(gX);
      if (is_cut) {
        ptx::st_shared_4(own, (Config::kNeutral & 0xffff) | __ldg(gHalves) << 16);
      } else if (is_last_cut) {
        ptx::st_shared_4(own + (count - 1) * (4 * Config::kThreads),
                         (Config::kNeutral & 0xffff0000u) | __ldg(gHalves + capacity - 1));
      }
    }
  }

  // Calls visit(i, word) for each of this thread's words, those that it lacks among them.
  template <typename Visit>
  __device__ __forceinline__ void for_each(uint32_t (*sWords)[Config::kThreads],
                                           Visit visit) const {
    const uint32_t own = ptx::shared_address(&sWords[0][threadIdx.x]);
#pragma unroll 1
    for (int block = 0; block < items; block += kGroup) {
      const uint32_t sBlock = own + block * (4 * Config::kThreads);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        visit(block + i, ptx::ld_shared_4(sBlock + i * (4 * Config::kThreads)));
      }
    }
  }

  // Writes down this thread's number of each element's column.
  __device__ __forceinline__ void write_partials(uint32_t* sPartials,
                                                 const uint32_t (&own)[kPer]) const {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (line >= 0 && has[e]) sPartials[line * width + column + e] = own[e];
    }
  }

  // Where words go, one after another.
  struct Stores {
    Element* gWord;
    int64_t step;
    int wholes, halves;  // of this thread, of which one kind exists
    int half;            // that is stored

    __device__ __forceinline__ void store(int i, uint32_t word) {
      ptx::st_global_4(gWord, word, i, wholes);
      if constexpr (kPer == 2) ptx::st_global_2(gWord + half, word >> (16 * half), i, halves);
      gWord += step;
    }
  };
  __device__ __forceinline__ Stores stores(Element* gOut) const {
    const bool is_whole = has[0] && has[kPer - 1];
    return {gOut + first, step, is_whole ? count : 0, is_whole ? 0 : count, has[0] ? 0 : 1};
  }
};

// One number for each column from those of the lines of all CTAs that share the strip.
template <typename Config>
struct StripColumns {
  StripShared<Config>& shared;
  int width, lines;
  bool is_shared;

  // combine(a, b) of the CTA's lines, narrow(a) of which the cluster's CTAs read, finish(a) of all.
  // Forward buffer 0 has maxima and buffer 1 sums; backward they take turns.
  template <typename Wide, typename Widen, typename Combine, typename Finish>
  __device__ __forceinline__ void reduce(int buffer, Wide neutral, Widen widen, Combine combine,
                                         Finish finish) const {
    const int column = static_cast<int>(threadIdx.x);
    __syncthreads();  // the numbers of all threads are there
    Wide own = neutral;
    if (column < width) {
#pragma unroll 4
      for (int line = 0; line < lines; ++line) {
        own = combine(own, widen(shared.partials[line * width + column]));
      }
    }
    if (is_shared) {
      if (column < width) shared.of_cta[buffer][column] = narrow(own);
      ptx::barrier_cluster();  // the numbers of all CTAs are there
      if (column < width) {
        const uint32_t place = ptx::shared_address(&shared.of_cta[buffer][column]);
        uint32_t rOf[Config::kCluster];
#pragma unroll
        for (int cta = 0; cta < Config::kCluster; ++cta) {
          rOf[cta] = ptx::ld_shared_cluster(ptx::mapa_shared_cluster(place, cta));
        }
        own = neutral;
#pragma unroll
        for (int cta = 0; cta < Config::kCluster; ++cta) own = combine(own, widen(rOf[cta]));
      }
    }
    if (column < width) shared.of_all[column] = __float_as_uint(finish(own));
    __syncthreads();  // the numbers of all columns are there
  }

 private:
  static __device__ __forceinline__ uint32_t narrow(float value) { return __float_as_uint(value); }
  static __device__ __forceinline__ uint32_t narrow(unsigned long long value) {
    return static_cast<uint32_t>(value);
  }
};

template <typename Config>
__device__ __forceinline__ void softmax_strip(StripShared<Config>& shared,
                                              const OwnOfStrip<Config>& own, bool is_shared,
                                              const typename Config::Element* gX,
                                              typename Config::Element* gOut, int64_t capacity,
                                              float exponent) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer;
  static_assert(kPer == 2, "sums of floats would depend on the kernel");
  const Scale<float> scale{exponent};
  const StripColumns<Config> columns{shared, own.width, own.lines, is_shared};
  own.load(shared.words[0], gX, capacity);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();

  uint32_t largest_word = Config::kNeutral;
  own.for_each(shared.words[0], [&](int, uint32_t word) {
    largest_word = largest_of_words<Element>(largest_word, word);
  });
  uint32_t partial[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    partial[e] = __float_as_uint(element_of<Element>(largest_word, e));
  }
  own.write_partials(shared.partials, partial);
  columns.reduce(
      0, minus_infinity<float>(), [](uint32_t bits) { return __uint_as_float(bits); },
      [](float a, float b) { return ptx::max_nan(a, b); },
      [](float maximum) { return shift_of(maximum); });
  float maximum[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) maximum[e] = __uint_as_float(shared.of_all[own.column_of(e)]);

  SumOfExponentials<Element> sum[kPer];
  own.for_each(shared.words[0], [&](int, uint32_t word) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      sum[e].add(scale.exponential(element_of<Element>(word, e), maximum[e]));
    }
  });
#pragma unroll
  for (int e = 0; e < kPer; ++e) partial[e] = sum[e].value;
  own.write_partials(shared.partials, partial);
  columns.reduce(
      1, 0ull, [](uint32_t sum) { return static_cast<unsigned long long>(sum); },
      [](unsigned long long a, unsigned long long b) { return a + b; },
      [](unsigned long long all) { return reciprocal_of_count(all); });
  float inverse[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) inverse[e] = __uint_as_float(shared.of_all[own.column_of(e)]);

  auto stores = own.stores(gOut);
  own.for_each(shared.words[0], [&](int i, uint32_t word) {
    stores.store(
        i, probability_word<Element>(
               word, scale, [&](int e) { return maximum[e]; }, [&](int e) { return inverse[e]; }));
  });
}

template <typename Config>
__device__ __forceinline__ void softmax_strip_backward(
    StripShared<Config>& shared, const OwnOfStrip<Config>& own, bool is_shared, int buffer,
    const typename Config::Element* gP, const typename Config::Element* gGrad,
    typename Config::Element* gOut, int64_t capacity, float scale) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer;
  own.load(shared.words[0], gP, capacity);
  own.load(shared.words[1], gGrad, capacity);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  const auto grad_of = [&](int i) {
    return ptx::ld_shared_4(ptx::shared_address(&shared.words[1][i][threadIdx.x]));
  };

  float sum[kPer] = {};
  own.for_each(shared.words[0],
               [&](int i, uint32_t word) { add_products<Element>(sum, word, grad_of(i)); });
  uint32_t partial[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) partial[e] = __float_as_uint(sum[e]);
  own.write_partials(shared.partials, partial);
  StripColumns<Config>{shared, own.width, own.lines, is_shared}.reduce(
      buffer, 0.0f, [](uint32_t bits) { return __uint_as_float(bits); },
      [](float a, float b) { return a + b; }, [](float all) { return all; });
#pragma unroll
  for (int e = 0; e < kPer; ++e) sum[e] = __uint_as_float(shared.of_all[own.column_of(e)]);

  auto stores = own.stores(gOut);
  own.for_each(shared.words[0], [&](int i, uint32_t word) {
    stores.store(i, gradient_word<Element>(word, grad_of(i), scale, [&](int e) { return sum[e]; }));
  });
}

// All strips of one matrix that a CTA takes, or, shared, those of which it takes a block of rows. Returns the
// buffer of its next shared strip.
template <typename Config>
__device__ __forceinline__ int take_strips(StripShared<Config>& shared, const Strips& strips,
                                           bool is_shared, int rank, int buffer, unsigned head,
                                           const typename Config::Element* gX,
                                           const typename Config::Element* gGrad,
                                           typename Config::Element* gOut, int64_t capacity,
                                           float factor) {
  constexpr int kCluster = Config::kCluster, kPer = Config::kPer;
  const int64_t columns = strips.columns;
  int rows = static_cast<int>(strips.rows);
  int64_t first_row = 0;
  if (is_shared) {
    const int block = (rows + kCluster * kPer - 1) / (kCluster * kPer) * kPer;
    first_row = rank * block;
    rows = max(min(rows - rank * block, block), 0);
  }
#pragma unroll 1
  for (int64_t strip = strips.first; strip < strips.end; ++strip) {
    const int64_t column = strip * strips.width;
    const int width =
        columns - column < strips.width ? static_cast<int>(columns - column) : strips.width;
    const OwnOfStrip<Config> own(width, rows, strips.begin + first_row * columns + column, columns,
                                 head);
    if constexpr (Config::kBackward) {
      softmax_strip_backward<Config>(shared, own, is_shared, buffer, gX, gGrad, gOut, capacity,
                                     factor);
      if (is_shared) buffer ^= 1;
    } else {
      softmax_strip<Config>(shared, own, is_shared, gX, gOut, capacity, factor);
    }
  }
  return buffer;
}

// All strips of a matrix that are computed from global memory.
template <typename Config>
__device__ __forceinline__ void take_long_strips(const Strips& strips,
                                                 const typename Config::Element* gX,
                                                 const typename Config::Element* gGrad,
                                                 typename Config::Element* gOut, float factor) {
  using Element = typename Config::Element;
  const int64_t begin = strips.begin, rows = strips.rows, columns = strips.columns;
#pragma unroll 1
  for (int64_t strip = strips.first; strip < strips.end; ++strip) {
    const int64_t column = strip * strips.width, place = begin + column;
    const int width =
        columns - column < strips.width ? static_cast<int>(columns - column) : strips.width;
    softmax_long_lines<typename Config::Long>(
        Place<Element, int64_t>{gX + place, gGrad + place, gOut + place, 1.0f}, true, 0, width,
        rows, 1, columns, lanes_of_long_lines(columns, true), Scale<float>{factor});
  }
}

template <typename Params>
struct StripsLaunch {
  Params params;
  int64_t window;  // elements of a CTA
};

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kCtas) void strips_kernel(
    const __grid_constant__ StripsLaunch<Params> launch) {
  if (!ptx::kIsSm90a) return;
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  constexpr int kCluster = Config::kCluster, kPer = Config::kPer;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<StripShared<Config>*>(dynamic_shared);
  const Params& params = launch.params;
  const MatricesView& matrices = params.matrices;
  const int64_t capacity = matrices.capacity;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
  const float factor = factor_of(params);
  const auto head = static_cast<unsigned>(reinterpret_cast<uintptr_t>(gX) / sizeof(Element) % kPer);
  const auto clamped = [&](int64_t element) { return element < capacity ? element : capacity; };
  const int64_t low = clamped(blockIdx.x * launch.window), high = clamped(low + launch.window);
  const int64_t all_low = clamped(blockIdx.x / kCluster * kCluster * launch.window),
                all_high = clamped(all_low + kCluster * launch.window);
  const auto rank = static_cast<int>(ptx::cluster_ctarank());

  StripsOf32& batch = shared.strips;
  int64_t first_seq = 0;  // of warp 0
  if (threadIdx.x < 32) first_seq = last_matrix_before(matrices, all_low);
  const auto plan = [&](int64_t index) {
    plan_strips<Config>(matrices, first_seq + 32 * index, low, high, all_low, all_high, batch);
  };

  bool any_long = false, any_shared = false, is_last;
  int buffer = 0;
  int64_t index = 0;
#pragma unroll 1
  do {
    if (threadIdx.x < 32) plan(index);
    __syncthreads();  // the strips of 32 matrices are there
    unsigned zeros = batch.are_zeros;
#pragma unroll 1
    for (; zeros != 0; zeros &= zeros - 1) {
      const Strips& none = batch.strips[__ffs(static_cast<int>(zeros)) - 1];
      store_zeros(gOut + none.zeros_begin, none.zeros_end - none.zeros_begin, threadIdx.x,
                  Config::kThreads);
    }
    any_long |= batch.are_long != 0;
    any_shared |= batch.of_cluster != 0;
    // Those of the cluster come first: all its CTAs wait for each other.
    unsigned of_cluster = batch.of_cluster, of_cta = batch.of_cta;
#pragma unroll 1
    while ((of_cluster | of_cta) != 0) {
      const bool is_shared = of_cluster != 0;
      const unsigned left = is_shared ? of_cluster : of_cta;
      const Strips& strips = batch.strips[__ffs(static_cast<int>(left)) - 1];
      if (is_shared) {
        of_cluster = left & (left - 1);
      } else {
        of_cta = left & (left - 1);
      }
      buffer = take_strips<Config>(shared, strips, is_shared, rank, buffer, head, gX, gGrad, gOut,
                                   capacity, factor);
    }
    is_last = batch.is_last;
    ++index;
    __syncthreads();  // all have left the strips
  } while (!is_last);
  if (any_shared) ptx::barrier_cluster();  // all CTAs have read what others have

  if (!any_long || threadIdx.x >= Config::kLongThreads) return;
  index = 0;
#pragma unroll 1
  do {
    if (threadIdx.x < 32) plan(index);
    __syncthreads();  // the strips of 32 matrices are there
    unsigned left = batch.are_long;
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const Strips& strips = batch.strips[__ffs(static_cast<int>(left)) - 1];
      take_long_strips<Config>(strips, gX, gGrad, gOut, factor);
    }
    is_last = batch.is_last;
    ++index;
    __syncthreads();  // all have left the strips
  } while (!is_last);
}

template <typename Element, typename Params>
cudaError_t launch_strips(const Params& params, cudaStream_t stream) {
  using Config = StripConfig<Element, Operands<Params>::kBackward>;
  // Backward a CTA holds half as many, and small windows fill the GPU sooner.
  const bool is_small =
      Config::kBackward && (sizeof(Element) == 4 || params.matrices.capacity < 40'000'000);
  const int64_t window = is_small ? 8'192 : 16'384;
  constexpr const char* kPath = Config::kBackward ? "cuda.jagged2_softmax_backward.rows.strips"
                                                  : "cuda.jagged2_softmax.rows.strips";
  const int64_t cluster = Config::kCluster * window;
  const int64_t clusters = (params.matrices.capacity + cluster - 1) / cluster;
  return launch_clusters<strips_kernel<Config, Params>>(
      StripsLaunch<Params>{params, window}, {clusters * Config::kCluster}, Config::kCluster,
      Config::kThreads, stream, sizeof(StripShared<Config>), kPath);
}

}  // namespace jagged_cuda::softmax
