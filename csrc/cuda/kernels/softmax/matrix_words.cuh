// jagged2_softmax over the rows of each column: a whole matrix in the registers of a cluster, by words
// of 4 bytes (softmax/lines.cuh: the mathematics; softmax/words.cuh).
//
// A matrix is one piece of memory. From its first aligned word on, kPer rows of C columns are C words
// (kPer elements each), wherever a row begins: words w and w + C hold the same columns. So there are
// neither strips nor ragged rows, only a *lone* element of 16 bits may be left before the first word
// and one behind the last.
//
// Grid: x, a cluster of kCluster CTAs for each tile of a matrix (softmax/spans.cuh, find_matrix_tile:
// the first tiles of all matrices need no search). The first tile's cluster has the whole matrix, if
// it fits: `abreast` times C threads, in as few CTAs as that takes, hold kItems words or fewer each,
// `step` = abreast C words apart, so that neighbours load neighbours. The other CTAs return at once. A
// matrix that does not fit is computed by spans, shared out by all CTAs of all its tiles.
//
//   load words | largest of own words        -> of the CTA (atomics) -> of the cluster
//   exponentials, kept; sum of own words     -> of the CTA (atomics) -> of the cluster
//   multiply, store words
//
// Backward there is the sum of p dp alone, of floats: kept apart for each thread, added in an order
// that follows from the matrix's shape and where it begins. Forward sums are integers, so that they
// depend on nothing but the line.
//
// Shared memory, over that of spans.cuh: for each column the CTA's maximum and sum, those of each CTA of
// the cluster, and backward a float for each element of a word of each thread.
// Barriers, beside __syncthreads: the cluster's, once all its CTAs run; `arrived[i]`, on which the
// maxima (0) and sums (1) that other CTAs send complete.
//
// Elements outside every matrix, and those of one that does not fit the vector, become zeros.
#pragma once

#include "cuda/kernels/prim/cluster.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/softmax/spans.cuh"

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_>
struct MatrixWordsConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_;
  static constexpr int kThreads = 256;
  static constexpr int kCluster = 1024 / kThreads * (sizeof(Element) == 4 ? 2 : 1);
  static constexpr int kMinCtas = 1024 / kThreads;  // per SM: 64 registers
  static constexpr int kItems = 20, kGroup = 4;     // words of a thread; that are skipped together
  static constexpr int kColumns = 256;              // of a matrix, at most
  static constexpr int kPer = kPerWord<Element>;
  // Forward with the threads that spans.cuh has elsewhere, so that a result does not depend on the
  // kernel.
  static constexpr int kSpanThreads = kBackward ? kThreads : 128;
  using Spans = SpanConfig<Element, kBackward, false, kSpanThreads>;
  // Of a matrix, at most. Forward what spans.cuh adds as integers, too, which bear 1,023 terms.
  static constexpr int kMaxRows =
      kBackward ? kItems * kPer * kThreads * kCluster : Spans::kMaxShort;
};

// How a cluster takes a matrix.
struct MatrixPlan {
  int64_t begin;  // its first element
  uint32_t columns, elems;
  uint32_t ctas;                // that have a part of it
  uint32_t step;                // threads that have words; from word to word of a thread
  uint32_t head;                // elements before the first word
  uint32_t words, items, rest;  // items that all threads have; threads that have one more
  float per_column;             // 1 / columns
};

enum class Way { kNothing, kWords, kSpans };

template <typename Config>
struct MatrixShared {
  static constexpr int kColumns = Config::kColumns, kForward = Config::kBackward ? 1 : kColumns;
  // Of each CTA. Beside each other lie columns, since stores to other CTAs that are not take longer.
  uint32_t all_maxima[Config::kCluster][kForward];
  uint32_t all_sums[Config::kCluster][kColumns];
  int maximum[kForward];  // ordered()
  uint32_t sum[kColumns];
  float partials[Config::kBackward ? Config::kPer * Config::kThreads : 1];
  float lone[2];
};

// floor(a * by), where by is about 1 / b: right for a / b below 2^16.
__device__ __forceinline__ uint32_t quotient(uint32_t a, float by) {
  return static_cast<uint32_t>((static_cast<float>(a) + 0.5f) * by);
}

// Floats in the order of integers, NaN behind all.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int bits) {
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

// How a cluster takes a matrix whose words start at `x`, if it fits.
template <typename Config>
__device__ __forceinline__ bool plan_matrix(const Matrix& matrix, const void* x, MatrixPlan& plan) {
  if (matrix.rows.len > Config::kMaxRows || matrix.columns.len > Config::kColumns) return false;
  constexpr uint32_t kRows = Config::kItems * Config::kPer;  // of a thread
  const auto rows = static_cast<uint32_t>(matrix.rows.len);
  plan.begin = matrix.begin;
  plan.columns = static_cast<uint32_t>(matrix.columns.len);
  plan.elems = rows * plan.columns;
  plan.step = (rows + kRows - 1) / kRows * plan.columns;
  plan.ctas = (plan.step + Config::kThreads - 1) / Config::kThreads;
  if (plan.ctas > Config::kCluster) return false;
  const uintptr_t first = reinterpret_cast<uintptr_t>(x) / sizeof(typename Config::Element);
  plan.head = Config::kPer == 1 ? 0 : (first + static_cast<uintptr_t>(matrix.begin)) % 2;
  plan.words = (plan.elems - plan.head) / Config::kPer;
  plan.items = quotient(plan.words, reciprocal(static_cast<float>(plan.step)));
  plan.rest = plan.words - plan.items * plan.step;
  plan.per_column = reciprocal(static_cast<float>(plan.columns));
  return true;
}

// What a cluster does with tile `index`. A whole warp.
template <typename Config>
__device__ __forceinline__ Way plan_tile(const MatricesView& matrices, const void* x,
                                         const Spans& spans, int64_t index, MatrixPlan& plan) {
  // By way of a shuffle, so that what follows is not computed in uniform registers, which takes longer.
  index = __shfl_sync(kAllLanes, index, 0);
  // A first tile is its matrix's, whose loads wait for no others.
  const bool is_first = index >= 1 && index <= matrices.rows.num_seqs;
  if (is_first) {
    const Matrix matrix = find_matrix(matrices, index - 1);
    if (matrix.fits) {
      if (matrix.rows.len == 0 || matrix.columns.len == 0) return Way::kNothing;
      if (plan_matrix<Config>(matrix, x, plan)) return Way::kWords;
    }
    return Way::kSpans;
  }
  const JaggedTile tile = find_matrix_tile(elements_of(matrices), spans.window_log2, index);
  if (tile.row >= tile.rows.len) return Way::kNothing;
  if (tile.seq < 0) return Way::kSpans;
  const Matrix matrix = find_matrix(matrices, tile.seq);
  return matrix.fits && plan_matrix<Config>(matrix, x, plan) ? Way::kNothing : Way::kSpans;
}

// The words of a thread, and which columns they have.
template <typename Config>
struct OwnWords {
  using Element = typename Config::Element;
  static constexpr int kPer = Config::kPer, kItems = Config::kItems, kGroup = Config::kGroup;
  int items;  // that some thread of the warp has, but for one; -1: none
  int count;  // of this thread
  uint32_t first_bytes, step_bytes;
  uint32_t column[kPer];

  __device__ __forceinline__ OwnWords(const MatrixPlan& plan, uint32_t thread)
      : items(thread - threadIdx.x % 32 < plan.step ? static_cast<int>(plan.items) : -1),
        count(thread < plan.step ? plan.items + (thread < plan.rest ? 1 : 0) : 0),
        step_bytes(4 * plan.step) {
    const uint32_t own = thread < plan.step ? thread : 0;
    first_bytes = 4 * own;
    uint32_t first = plan.head + kPer * (own - quotient(own, plan.per_column) * plan.columns);
#pragma unroll
    for (int i = 0; i < kPer; ++i) first = min(first, first - plan.columns);
    column[0] = first;
    if constexpr (kPer == 2) column[1] = first + 1 == plan.columns ? 0 : first + 1;
  }

  // Calls visit(i) for each word; those that this thread lacks are neutral.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll
    for (int first = 0; first < kItems; first += kGroup) {
      if (first <= items) {
#pragma unroll
        for (int i = first; i < first + kGroup; ++i) visit(i);
      }
    }
  }

  // From the matrix's first word on, which are read this once.
  __device__ __forceinline__ void load(const Element* gWords, uint32_t neutral,
                                       uint32_t (&rX)[kItems]) const {
    const char* bytes = reinterpret_cast<const char*>(gWords);
    const uint64_t policy = ptx::l2_policy(/*is_read_once=*/true);
#pragma unroll
    for (int i = 0; i < kItems; ++i) rX[i] = neutral;
    for_each([&](int i) {
      ptx::ld_global_nc_4_hinted(rX[i], bytes + (first_bytes + i * step_bytes), i, count, policy);
    });
  }

  // Stores word_of(i) of each word.
  template <typename WordOf>
  __device__ __forceinline__ void store(Element* gWords, WordOf word_of) const {
    char* bytes = reinterpret_cast<char*>(gWords);
    for_each([&](int i) {
      ptx::st_global_4(bytes + (first_bytes + i * step_bytes), word_of(i), i, count);
    });
  }
};

// An element that is in no word: the first one, of thread 0, or the last one, of thread 1.
struct LoneElement {
  bool exists;
  uint32_t place, column;

  template <typename Config>
  static __device__ __forceinline__ LoneElement of(const MatrixPlan& plan, uint32_t thread) {
    if (Config::kPer == 1 || thread >= 2) return {false, 0, 0};
    if (thread == 0) return {plan.head != 0, 0, 0};
    return {(plan.elems - plan.head) % 2 != 0, plan.elems - 1, plan.columns - 1};
  }
};

// How the CTAs of a matrix put together what each of them has of a column.
template <typename Config>
struct ClusterColumns {
  static constexpr int kCluster = Config::kCluster, kThreads = Config::kThreads;
  uint32_t rank, ctas, columns;

  // Those of CTAs that have no part of the matrix are `neutral`.
  __device__ __forceinline__ void init(uint32_t (*sAll)[Config::kColumns], uint32_t neutral) const {
    if (ctas == 1 || ctas == kCluster) return;
#pragma unroll
    for (int first = 0; first < Config::kColumns; first += kThreads) {
#pragma unroll
      for (int cta = 2; cta < kCluster; ++cta) {
        if (cta >= ctas) sAll[cta][first + threadIdx.x] = neutral;
      }
    }
  }

  // Sends this CTA's values to all, and waits for theirs.
  __device__ __forceinline__ void exchange(const uint32_t* sOwn, uint32_t (*sAll)[Config::kColumns],
                                           uint64_t& arrived) const {
    if (ctas == 1) return;
    const uint32_t barrier = ptx::shared_address(&arrived);
#pragma unroll
    for (int first = 0; first < Config::kColumns; first += kThreads) {
      const uint32_t column = first + threadIdx.x;
      if (column < columns) {
        const uint32_t place = ptx::shared_address(&sAll[rank][column]);
#pragma unroll
        for (uint32_t to = 0; to < kCluster; ++to) {
          if (to < ctas) {
            ptx::st_async(ptx::mapa_shared_cluster(place, to), sOwn[column],
                          ptx::mapa_shared_cluster(barrier, to));
          }
        }
      }
    }
    ptx::mbarrier_wait(arrived, 0);
  }

  // combine(a, b) of all CTAs' values of a column.
  template <typename Combine>
  __device__ __forceinline__ uint32_t of_all(const uint32_t* sOwn,
                                             const uint32_t (*sAll)[Config::kColumns],
                                             uint32_t column, Combine combine) const {
    if (ctas == 1) return sOwn[column];
    uint32_t result = sAll[0][column];
#pragma unroll
    for (int cta = 1; cta < kCluster; ++cta) result = combine(result, sAll[cta][column]);
    return result;
  }
};

template <typename Config>
__device__ __forceinline__ void softmax_matrix(const MatrixPlan& plan,
                                               const typename Config::Element* gX,
                                               typename Config::Element* gOut, float exponent,
                                               uint32_t rank, uint64_t (&arrived)[2],
                                               MatrixShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer, kItems = Config::kItems;
  static_assert(kPer == 2, "sums of floats would depend on the kernel");
  const uint32_t thread = rank * Config::kThreads + threadIdx.x;
  const ClusterColumns<Config> cluster{rank, plan.ctas, plan.columns};
  const OwnWords<Config> own(plan, thread);
  const auto lone = LoneElement::of<Config>(plan, thread);
  const Scale<float> scale{exponent};

  uint32_t rX[kItems];
  own.load(gX + plan.head, kMinusInfinities<Element>, rX);
  const float lone_x = lone.exists ? to_sum(gX[lone.place]) : 0.0f;
  cluster.init(shared.all_maxima, INT_MIN);
  cluster.init(shared.all_sums, 0);

  uint32_t largest_word = kMinusInfinities<Element>;
  own.for_each([&](int i) { largest_word = largest_of_words<Element>(largest_word, rX[i]); });
  if (own.count > 0) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      atomicMax(&shared.maximum[own.column[e]], ordered(element_of<Element>(largest_word, e)));
    }
  }
  if (lone.exists) atomicMax(&shared.maximum[lone.column], ordered(lone_x));
  if (plan.ctas > 1) ptx::barrier_cluster_wait();  // all CTAs run
  __syncthreads();                                 // the CTA's maxima are there
  const auto* sMaximum = reinterpret_cast<const uint32_t*>(shared.maximum);
  cluster.exchange(sMaximum, shared.all_maxima, arrived[0]);
  const auto maximum_of = [&](uint32_t column) {
    const auto largest_one = [](uint32_t a, uint32_t b) {
      return static_cast<uint32_t>(max(static_cast<int>(a), static_cast<int>(b)));
    };
    return shift_of(from_ordered(
        static_cast<int>(cluster.of_all(sMaximum, shared.all_maxima, column, largest_one))));
  };
  float maximum[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) maximum[e] = maximum_of(own.column[e]);

  float rE[kItems][kPer];
  SumOfExponentials<Element> sum[kPer];
  own.for_each([&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      rE[i][e] = scale.exponential(element_of<Element>(rX[i], e), maximum[e]);
      sum[e].add(rE[i][e]);
    }
  });
  if (own.count > 0) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) atomicAdd(&shared.sum[own.column[e]], sum[e].value);
  }
  float lone_e = 0;
  if (lone.exists) {
    lone_e = scale.exponential(lone_x, maximum_of(lone.column));
    // One term, not a multiple of four
    atomicAdd(&shared.sum[lone.column], __float_as_uint(lone_e + 2.0f) - 0x40000000u);
  }
  __syncthreads();  // the CTA's sums are there
  cluster.exchange(shared.sum, shared.all_sums, arrived[1]);
  const auto inverse_of = [&](uint32_t column) {
    SumOfExponentials<Element> all;
    all.value = cluster.of_all(shared.sum, shared.all_sums, column,
                               [](uint32_t a, uint32_t b) { return a + b; });
    return all.inverse();
  };
  float inverse[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) inverse[e] = inverse_of(own.column[e]);
  own.store(gOut + plan.head, [&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) rE[i][e] *= inverse[e];
    return word_of<Element>(rE[i]);
  });
  if (lone.exists) gOut[lone.place] = from_sum<Element>(lone_e * inverse_of(lone.column));
}

template <typename Config>
__device__ __forceinline__ void softmax_matrix_backward(const MatrixPlan& plan,
                                                        const typename Config::Element* gP,
                                                        const typename Config::Element* gGrad,
                                                        typename Config::Element* gOut, float scale,
                                                        uint32_t rank, uint64_t (&arrived)[2],
                                                        MatrixShared<Config>& shared) {
  using Element = typename Config::Element;
  constexpr int kPer = Config::kPer, kItems = Config::kItems, kThreads = Config::kThreads;
  const uint32_t thread = rank * kThreads + threadIdx.x;
  const ClusterColumns<Config> cluster{rank, plan.ctas, plan.columns};
  const OwnWords<Config> own(plan, thread);
  const auto lone = LoneElement::of<Config>(plan, thread);

  uint32_t rP[kItems], rGrad[kItems];
  own.load(gP + plan.head, 0, rP);
  own.load(gGrad + plan.head, 0, rGrad);
  const float lone_p = lone.exists ? to_sum(gP[lone.place]) : 0.0f;
  const float lone_grad = lone.exists ? to_sum(gGrad[lone.place]) : 0.0f;
  cluster.init(shared.all_sums, 0);

  float sum[kPer] = {};
  own.for_each([&](int i) {
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      sum[e] = fmaf(element_of<Element>(rP[i], e), element_of<Element>(rGrad[i], e), sum[e]);
    }
  });
#pragma unroll
  for (int e = 0; e < kPer; ++e) shared.partials[kPer * threadIdx.x + e] = sum[e];
  if (thread < 2) shared.lone[thread] = lone_p * lone_grad;
  if (plan.ctas > 1) ptx::barrier_cluster_wait();  // all CTAs run
  __syncthreads();                                 // the threads' sums are there
#pragma unroll 1
  for (uint32_t column = threadIdx.x; column < plan.columns; column += kThreads) {
    // Elements column - head, column - head + columns, ... of all threads' first words have it.
    const uint32_t begin = kPer * rank * kThreads,
                   end = min(begin + kPer * kThreads, kPer * plan.step);
    uint32_t place = column >= plan.head ? column - plan.head : column + plan.columns - plan.head;
    if (place < begin) {
      place += quotient(begin - place + plan.columns - 1, plan.per_column) * plan.columns;
    }
    float total = 0;
#pragma unroll 4
    for (; place < end; place += plan.columns) total += shared.partials[place - begin];
    if (kPer == 2 && rank == 0) {
      if (column == 0) total += shared.lone[0];
      if (column == plan.columns - 1) total += shared.lone[1];
    }
    shared.sum[column] = __float_as_uint(total);
  }
  __syncthreads();  // the CTA's sums are there
  cluster.exchange(shared.sum, shared.all_sums, arrived[1]);
  const auto sum_of = [&](uint32_t column) {
    return __uint_as_float(
        cluster.of_all(shared.sum, shared.all_sums, column, [](uint32_t a, uint32_t b) {
          return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
        }));
  };
#pragma unroll
  for (int e = 0; e < kPer; ++e) sum[e] = sum_of(own.column[e]);
  own.store(gOut + plan.head, [&](int i) {
    return gradient_word<Element>(rP[i], rGrad[i], scale, [&](int e) { return sum[e]; });
  });
  if (lone.exists) {
    gOut[lone.place] = from_sum<Element>(scale * lone_p * (lone_grad - sum_of(lone.column)));
  }
}

// A matrix that is too large for a cluster, or elements of none.
template <typename Config, typename Params>
__device__ __noinline__ void softmax_tile_by_spans(const SpanLaunch<Params>& launch, int rank) {
  if (threadIdx.x < 32) {
    make_tile_plan<typename Config::Spans>(launch.params.matrices, launch.spans, true,
                                           blockIdx.x / Config::kCluster, rank, Config::kCluster);
  }
  __syncthreads();  // the plan is there
  softmax_spans<typename Config::Spans>(launch);
}

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void matrix_words_kernel(
    const __grid_constant__ SpanLaunch<Params> launch) {
  if (!ptx::kIsSm90a) return;
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  __shared__ MatrixPlan plan;
  __shared__ Way way;
  __shared__ float factor;
  __shared__ alignas(8) uint64_t arrived[2];
  auto& shared = *reinterpret_cast<MatrixShared<Config>*>(dynamic_shared);
  const Params& params = launch.params;
  if (threadIdx.x < 32) {
    MatrixPlan found;
    const Way found_way = plan_tile<Config>(params.matrices, Operand::x(params), launch.spans,
                                            blockIdx.x / Config::kCluster, found);
    if (threadIdx.x == 0) {
      way = found_way;
      if (found_way == Way::kWords) {
        plan = found;
        factor = factor_of(params);
        if (found.ctas > 1) {
#pragma unroll
          for (int i = 0; i < 2; ++i) ptx::mbarrier_init(arrived[i], 1);
          ptx::fence_mbarrier_init();
          const int bytes = static_cast<int>(4 * found.columns * found.ctas);
#pragma unroll
          for (int i = 0; i < 2; ++i) ptx::mbarrier_arrive_expect_tx(arrived[i], bytes);
        }
      }
    }
  }
  if constexpr (!Config::kBackward) {
#pragma unroll
    for (int i = 0; i < Config::kColumns; i += Config::kThreads) {
      shared.maximum[i + threadIdx.x] = INT_MIN;
      shared.sum[i + threadIdx.x] = 0;
    }
  }
  __syncthreads();  // the plan, the barriers, and what columns begin with are there
  if (way == Way::kNothing) return;
  const uint32_t rank = ptx::cluster_ctarank();
  if (way == Way::kSpans) {
    if (threadIdx.x >= Config::kSpanThreads) return;
    softmax_tile_by_spans<Config>(launch, static_cast<int>(rank));
    return;
  }
  if (rank >= plan.ctas) return;
  if (plan.ctas > 1) ptx::barrier_cluster_arrive_relaxed();
  const Element* gX = static_cast<const Element*>(Operand::x(params)) + plan.begin;
  Element* gOut = static_cast<Element*>(Operand::result(params)) + plan.begin;
  if constexpr (Config::kBackward) {
    const Element* gGrad = static_cast<const Element*>(Operand::grad(params)) + plan.begin;
    softmax_matrix_backward<Config>(plan, gX, gGrad, gOut, factor, rank, arrived, shared);
  } else {
    softmax_matrix<Config>(plan, gX, gOut, factor, rank, arrived, shared);
  }
}

template <typename Element, typename Params>
cudaError_t launch_matrix_words(const Params& params, cudaStream_t stream) {
  using Config = MatrixWordsConfig<Element, Operands<Params>::kBackward>;
  // A cluster's share of a matrix that is computed by spans has 2^17 elements.
  constexpr int kBuffer = 24 << 10, kTileLog2 = 17;
  constexpr Spans kSpans{(kBuffer + 32) / static_cast<int>(sizeof(Element)), kTileLog2};
  constexpr int kBytes = SpanShared<typename Config::Spans>::bytes(kSpans.buffer);
  static_assert(sizeof(MatrixShared<Config>) <= kBytes);
  constexpr const char* kPath = Config::kBackward ? "cuda.jagged2_softmax_backward.rows.words"
                                                  : "cuda.jagged2_softmax.rows.words";
  const int64_t tiles =
      num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs, 1 << kTileLog2);
  return launch_clusters<matrix_words_kernel<Config, Params>>(
      SpanLaunch<Params>{params, kSpans}, {tiles * Config::kCluster}, Config::kCluster,
      Config::kThreads, stream, kBytes, kPath);
}

}  // namespace jagged_cuda::softmax
