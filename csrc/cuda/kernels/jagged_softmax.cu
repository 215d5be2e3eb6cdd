// jagged_softmax, forward and backward, over the rows i of each sequence and for each column c:
//
//   m[c]     = max_j scale x[j, c]
//   p[i, c]  = exp(scale x[i, c] - m[c]) / sum_j exp(scale x[j, c] - m[c])
//   dx[i, c] = scale p[i, c] (dp[i, c] - sum_j dp[j, c] p[j, c])
//
// A *group* is up to 64 bytes of columns: vectors of 16 bytes (8 where rows are aligned to no more, or
// single elements). Grid: x, the groups, so that those of a row run together; y, a CTA of 4 warps for
// each sequence, or for each 4 sequences of a large batch. The threads that share a sequence form a
// grid, columns fastest. Who shares it depends on its own length alone, so that results don't depend on
// the batch:
//   - up to kItems vectors for each lane of one warp: one warp; sums go by shuffles
//   - up to kItems vectors for each thread: the CTA, which keeps the sequence in registers: one pass
//   - longer: the CTA reads it twice, with a running maximum and sum the first time
//
// Shared memory: the partial results of 4 warps for a group, two buffers in turn (1,024 bytes).
// Barriers: one __syncthreads in each reduction over the CTA, between writing and reading its
// buffer. A buffer is written again only after the barrier of the next reduction, which uses the
// other one: by then all have read it.
//
// A sequence without rows is skipped. Rows before the first and after the last sequence become
// zeros, all CTAs sharing the work. As in torch, a NaN or +inf makes its column NaN, and so does a
// column of -inf.
#include "cuda/kernels/jagged_softmax.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/softmax/words.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kItems = 4;        // vectors that a thread keeps in registers
constexpr int kGroupBytes = 64;  // of a row beside each other: what DRAM reads at a time
// Rows of no more elements than these go by vectors of 4, so that more threads share a column's sums.
constexpr int kNarrow = 16;
// Up to here, each sequence has a CTA of its own.
constexpr int kManySeqs = 2048;

struct SharedStorage {
  alignas(16) unsigned char partial[2][kWarps * kGroupBytes * 2];
};
static_assert(sizeof(SharedStorage) == 1024, "as the header says");

using softmax::kAllLanes;
using softmax::kLog2E;
using softmax::Scale;
using softmax::shift_of;

__device__ __forceinline__ float minus_infinity(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double minus_infinity(double) {
  return __longlong_as_double(0xfff0000000000000LL);
}
__device__ __forceinline__ double shift_of(double maximum) { return maximum + (maximum - maximum); }
// NaN if either is.
__device__ __forceinline__ float largest(float a, float b) { return ptx::max_nan(a, b); }
__device__ __forceinline__ double largest(double a, double b) { return a > b || a != a ? a : b; }

// Elements of a vector that are compared together: two of 16 bits in a word, else one.
template <typename Element, int kVector>
struct Packed {
  static constexpr bool kPairs = sizeof(Element) == 2 && kVector % 2 == 0;
  static constexpr int kCount = kPairs ? kVector / 2 : kVector;
  using Value = std::conditional_t<kPairs, uint32_t, Sum<Element>>;
  using Loaded = Vector<Element, kVector>;

  static __device__ __forceinline__ Value lowest() {
    if constexpr (kPairs) {
      return softmax::kMinusInfinities<Element>;
    } else {
      return minus_infinity(Sum<Element>{});
    }
  }
  static __device__ __forceinline__ Value largest_of(Value a, Value b) {
    if constexpr (kPairs) {
      return ptx::max_nan_x2<Element>(a, b);
    } else {
      return largest(a, b);
    }
  }
  // values = max(values, loaded), or of -loaded.
  static __device__ __forceinline__ void enlarge(Value (&values)[kCount], const Loaded& loaded,
                                                 bool negative) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kPairs) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(loaded.elems)[i];
        values[i] = largest_of(values[i], word ^ (negative ? 0x80008000u : 0));
      } else {
        const auto x = to_sum(loaded.elems[i]);
        values[i] = largest_of(values[i], negative ? -x : x);
      }
    }
  }
  static __device__ __forceinline__ Sum<Element> element(const Value (&values)[kCount], int e) {
    if constexpr (kPairs) {
      return softmax::element_of<Element>(values[e / 2], e % 2);
    } else {
      return values[e];
    }
  }
  static __device__ __forceinline__ bool is_lowest(const Value (&values)[kCount], int e) {
    return element(values, e) == minus_infinity(Sum<Element>{});
  }
  // The logit, before the scale, that an element of enlarge()'s stands for.
  static __device__ __forceinline__ Sum<Element> logit(const Value (&values)[kCount], int e,
                                                       bool negative) {
    const auto x = element(values, e);
    return negative ? -x : x;
  }
};

// What the compiler knows of the values is of no use to it afterwards.
template <typename Element, int kVector>
__device__ __forceinline__ void forget(Vector<Element, kVector>& vector) {
  if constexpr (sizeof(vector) % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(vector.elems);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(vector) / 4); ++i) asm("" : "+r"(words[i]));
  }
}

// The place of a thread among those that share a sequence: a warp, or the whole CTA.
struct Place {
  bool in_cta;
  int row;  // first row; the others follow at row_step
  int row_step;
  int lanes;       // vectors beside each other, a power of two
  int64_t column;  // of the thread's vector
  bool exists;     // column < columns

  __device__ __forceinline__ Place(bool in_cta, int lanes_log2, int64_t first_vector, int vector,
                                   int64_t columns)
      : in_cta(in_cta) {
    const int thread = in_cta ? threadIdx.x : threadIdx.x % 32;
    lanes = 1 << lanes_log2;
    row = thread >> lanes_log2;
    row_step = (in_cta ? kThreads : 32) >> lanes_log2;
    column = (first_vector + (thread & (lanes - 1))) * vector;
    exists = column < columns;
  }
};

// Combines value[] of all threads at the place that hold the same columns; every thread gets the
// result. `buffer` is 0 and 1 in turn.
template <int kCount, typename Value, typename Combine>
__device__ __forceinline__ void reduce_rows(Value (&value)[kCount], const Place& place,
                                            SharedStorage& shared, int buffer, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < place.lanes) break;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      value[e] = combine(value[e], __shfl_xor_sync(0xffffffffu, value[e], offset));
    }
  }
  if (place.in_cta) {
    // [kWarps, place.lanes, kCount]
    auto* sPartial = reinterpret_cast<Value*>(shared.partial[buffer]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = place.lanes * kCount;
    if (lane < place.lanes) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sPartial[warp * all + lane * kCount + e] = value[e];
    }
    __syncthreads();
    const int own = (lane & (place.lanes - 1)) * kCount;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      Value result = sPartial[own + e];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) result = combine(result, sPartial[w * all + own + e]);
      value[e] = result;
    }
  }
}

// ---- Forward -----------------------------------------------------------------------------------

// One sequence as the threads of a group see it: their columns of its rows.
template <typename Element, int kVector>
struct SoftmaxView {
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;

  const Element* gX;  // [len, kVector], x_stride apart
  Element* gOut;      // [len, kVector], columns apart
  int64_t x_stride;
  int64_t columns;
  int64_t len;  // 0 for a thread without columns
  Scale<S> scale;
  bool negative;  // the scale

  __device__ __forceinline__ SoftmaxView(const JaggedSoftmaxParams& params, const RowRange& range,
                                         const Place& place)
      : gX(static_cast<const Element*>(params.x) + range.begin * params.x_stride + place.column),
        gOut(static_cast<Element*>(params.out) + range.begin * params.columns + place.column),
        x_stride(params.x_stride),
        columns(params.columns),
        len(place.exists ? range.len : 0),
        scale{static_cast<S>(params.scale * (std::is_same_v<S, float> ? kLog2E : 1.0))},
        negative(params.scale < 0) {}

  __device__ __forceinline__ Loaded load(int64_t row) const {
    return *reinterpret_cast<const Loaded*>(gX + row * x_stride);
  }

  __device__ __forceinline__ void store(const S (&rP)[kVector], const S (&inverse)[kVector],
                                        int64_t row) const {
    Loaded result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) result.elems[e] = from_sum<Element>(rP[e] * inverse[e]);
    *reinterpret_cast<Loaded*>(gOut + row * columns) = result;
  }
};

// A sequence of at most kItems rows for each thread, kept in registers.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_short(const JaggedSoftmaxParams& params,
                                              const RowRange& range, const Place& place,
                                              SharedStorage& shared) {
  using S = Sum<Element>;
  using View = SoftmaxView<Element, kVector>;
  using Pairs = Packed<Element, kVector>;
  const View view(params, range, place);
  const int len = static_cast<int>(view.len), last = static_cast<int>(range.len);
  // Rows of item i, which some thread has
  const auto some = [&](int i) { return i * place.row_step < last; };
  const auto row_of = [&](int i) { return place.row + i * place.row_step; };
  typename View::Loaded rX[kItems] = {};
  typename Pairs::Value greatest[Pairs::kCount];
#pragma unroll
  for (int i = 0; i < Pairs::kCount; ++i) greatest[i] = Pairs::lowest();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) rX[i] = view.load(row_of(i));
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) Pairs::enlarge(greatest, rX[i], view.negative);
  }
  reduce_rows(greatest, place, shared, 0, Pairs::largest_of);
  S shift[kVector], sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    shift[e] = shift_of(Pairs::logit(greatest, e, view.negative));
    sum[e] = S(0);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sum[e] += view.scale.exponential(to_sum(rX[i].elems[e]), shift[e]);
      }
    }
  }
  reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = softmax::reciprocal(sum[e]);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    forget(rX[i]);
    if (some(i) && row_of(i) < len) {
      S rP[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        rP[e] = view.scale.exponential(to_sum(rX[i].elems[e]), shift[e]);
      }
      view.store(rP, sum, row_of(i));
    }
  }
}

// A longer one, read twice by the whole CTA.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_long(const JaggedSoftmaxParams& params,
                                             const RowRange& range, const Place& place,
                                             SharedStorage& shared) {
  using S = Sum<Element>;
  using View = SoftmaxView<Element, kVector>;
  using Pairs = Packed<Element, kVector>;
  const View view(params, range, place);
  const int step = place.row_step;
  typename Pairs::Value greatest[Pairs::kCount], own[Pairs::kCount];
  S shift[kVector], sum[kVector];
#pragma unroll
  for (int i = 0; i < Pairs::kCount; ++i) greatest[i] = Pairs::lowest();
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);

  // Each thread over its own rows, relative to the largest logit that it has seen.
#pragma unroll 1
  for (int64_t first = place.row; first < view.len; first += kItems * step) {
    const int left =
        static_cast<int>(view.len - first < kItems * step ? view.len - first : kItems * step);
    typename View::Loaded rX[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) rX[i] = view.load(first + i * step);
    }
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) own[i] = greatest[i];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) Pairs::enlarge(greatest, rX[i], view.negative);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      // So long as all is -inf, any finite shift gives the right sum of 0, where -inf would give
      // NaN.
      shift[e] = Pairs::is_lowest(greatest, e) ? S(0) : Pairs::logit(greatest, e, view.negative);
      if (!Pairs::is_lowest(own, e)) {
        sum[e] *= view.scale.exponential(Pairs::logit(own, e, view.negative), shift[e]);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * step < left) {
          sum[e] += view.scale.exponential(to_sum(rX[i].elems[e]), shift[e]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Pairs::kCount; ++i) own[i] = greatest[i];
  reduce_rows(greatest, place, shared, 0, Pairs::largest_of);
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    shift[e] = shift_of(Pairs::logit(greatest, e, view.negative));
    if (!Pairs::is_lowest(own, e)) {
      sum[e] *= view.scale.exponential(Pairs::logit(own, e, view.negative), shift[e]);
    }
  }
  reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = softmax::reciprocal(sum[e]);

#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += step) {
    const auto loaded = view.load(row);
    S rP[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      rP[e] = view.scale.exponential(to_sum(loaded.elems[e]), shift[e]);
    }
    view.store(rP, sum, row);
  }
}

// ---- Backward ----------------------------------------------------------------------------------

template <typename Element, int kVector>
struct SoftmaxBackwardView {
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;

  const Element* gGrad;  // [len, kVector], grad_stride apart
  const Element* gP;     // [len, kVector], p_stride apart
  Element* gGradX;       // [len, kVector], columns apart
  int64_t grad_stride;
  int64_t p_stride;
  int64_t columns;
  int64_t len;  // 0 for a thread without columns
  S scale;

  __device__ __forceinline__ SoftmaxBackwardView(const JaggedSoftmaxBackwardParams& params,
                                                 const RowRange& range, const Place& place)
      : gGrad(static_cast<const Element*>(params.grad_out) + range.begin * params.grad_out_stride +
              place.column),
        gP(static_cast<const Element*>(params.out) + range.begin * params.out_stride +
           place.column),
        gGradX(static_cast<Element*>(params.grad_x) + range.begin * params.columns + place.column),
        grad_stride(params.grad_out_stride),
        p_stride(params.out_stride),
        columns(params.columns),
        len(place.exists ? range.len : 0),
        scale(static_cast<S>(params.scale)) {}

  __device__ __forceinline__ void load(Loaded& rGrad, Loaded& rP, int64_t row) const {
    rGrad = *reinterpret_cast<const Loaded*>(gGrad + row * grad_stride);
    rP = *reinterpret_cast<const Loaded*>(gP + row * p_stride);
  }

  // sum += grad * p
  static __device__ __forceinline__ void add(S (&sum)[kVector], const Loaded& rGrad,
                                             const Loaded& rP) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      sum[e] = fma(to_sum(rGrad.elems[e]), to_sum(rP.elems[e]), sum[e]);
    }
  }

  __device__ __forceinline__ void store(const S (&sum)[kVector], const Loaded& rGrad,
                                        const Loaded& rP, int64_t row) const {
    Loaded result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      result.elems[e] =
          from_sum<Element>(scale * to_sum(rP.elems[e]) * (to_sum(rGrad.elems[e]) - sum[e]));
    }
    *reinterpret_cast<Loaded*>(gGradX + row * columns) = result;
  }
};

// A sequence of at most kItems rows for each thread, kept in registers.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_short(const JaggedSoftmaxBackwardParams& params,
                                              const RowRange& range, const Place& place,
                                              SharedStorage& shared) {
  using View = SoftmaxBackwardView<Element, kVector>;
  using S = Sum<Element>;
  const View view(params, range, place);
  const int len = static_cast<int>(view.len), last = static_cast<int>(range.len);
  // Rows of item i, which some thread has
  const auto some = [&](int i) { return i * place.row_step < last; };
  const auto row_of = [&](int i) { return place.row + i * place.row_step; };
  typename View::Loaded rGrad[kItems] = {}, rP[kItems] = {};
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) view.load(rGrad[i], rP[i], row_of(i));
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) View::add(sum, rGrad[i], rP[i]);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
  // So that what they are as floats is not kept
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    forget(rGrad[i]);
    forget(rP[i]);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) view.store(sum, rGrad[i], rP[i], row_of(i));
  }
  if (place.in_cta) __syncthreads();  // one reduction per sequence: its buffer is used again
}

// A longer one, read twice by the whole CTA.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_long(const JaggedSoftmaxBackwardParams& params,
                                             const RowRange& range, const Place& place,
                                             SharedStorage& shared) {
  using View = SoftmaxBackwardView<Element, kVector>;
  using S = Sum<Element>;
  const View view(params, range, place);
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    View::add(sum, rGrad, rP);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    view.store(sum, rGrad, rP, row);
  }
  __syncthreads();
}

// ---- Backward by a ring, for long means ---------------------------------------------------------

// Batches of more rows than these for each sequence take the ring.
constexpr int kLongMean = 64;
// Stages of the ring. kItems vectors of both operands for each thread are a stage.
constexpr int kStages = 3;
// Per SM, as shared memory allows, and registers for vectors of 8 bytes.
template <int kVectorBytes>
constexpr int kRingCtas = kVectorBytes == 16 ? 4 : 6;

template <int kVectorBytes>
struct RingStorage {
  // What a thread copies there, it alone reads. [stage, item, dp or p, thread]
  alignas(16) unsigned char slots[kStages][kItems][2][kThreads][kVectorBytes];
  SharedStorage reduced;
};
static_assert(sizeof(RingStorage<16>) == 50'176 && sizeof(RingStorage<8>) == 25'600,
              "as the header says");

// The rows of a sequence that the CTA takes, kItems for each thread at a time: a stage.
template <typename Element, int kVector>
struct StagedSequence {
  SoftmaxBackwardView<Element, kVector> view;
  int stages;

  __device__ __forceinline__ StagedSequence(const JaggedSoftmaxBackwardParams& params,
                                            const RowRange& range, const Place& place)
      : view(params, range, place) {
    const int rows = place.row_step * kItems;
    stages = static_cast<int>((range.len + rows - 1) / rows);
  }
};

template <typename Element, int kVector>
class BackwardRing {
 public:
  using View = SoftmaxBackwardView<Element, kVector>;
  using Sequence = StagedSequence<Element, kVector>;
  using Loaded = typename View::Loaded;
  using S = typename View::S;
  using Storage = RingStorage<sizeof(Loaded)>;

  __device__ __forceinline__ BackwardRing(Storage& shared, const Place& place)
      : shared_(shared), place_(place) {}

  // Starts copies of the stages of `sequence`, the next one, that find room beside the `taken` ones
  // of the sequence before.
  __device__ __forceinline__ void start(const Sequence& sequence, int taken) {
#pragma unroll 1
    for (int stage = 0; stage < min(kStages - taken, sequence.stages); ++stage) {
      copy(sequence, stage, !flipped_);
    }
  }

  // Gradients of `sequence`, which start() has seen. Copies of `next` take its places as soon as
  // they are free.
  __device__ __forceinline__ void take(const Sequence& sequence, const Sequence& next) {
    flipped_ = !flipped_;
    start(next, sequence.stages);
    S sum[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll 1
    for (int stage = 0; stage < sequence.stages; ++stage) {
      wait();
      for_each_row(sequence, stage, [&](const Loaded& rGrad, const Loaded& rP, int64_t) {
        View::add(sum, rGrad, rP);
      });
      if (stage + kStages < sequence.stages) copy(sequence, stage + kStages, flipped_);
    }
    reduce_rows(sum, place_, shared_.reduced, flipped_ ? 1 : 0, [](S a, S b) { return a + b; });
#pragma unroll 1
    for (int stage = sequence.stages - 1; stage >= 0; --stage) {
      if (stage + kStages < sequence.stages) wait();
      for_each_row(sequence, stage, [&](const Loaded& rGrad, const Loaded& rP, int64_t row) {
        sequence.view.store(sum, rGrad, rP, row);
      });
      if (stage >= kStages) {
        copy(sequence, stage - kStages, flipped_);
      } else if (kStages - 1 - stage < next.stages) {
        copy(next, kStages - 1 - stage, !flipped_);
      }
    }
  }

 private:
  using Slots = unsigned char[kItems][2][kThreads][sizeof(Loaded)];

  // Where a stage lies, whether it goes forwards or backwards. A sequence leaves the place of its
  // stage 0 last, so that the next one has that for its stage kStages - 1, in flipped order.
  __device__ __forceinline__ Slots& slots_of(int stage, bool flipped) const {
    const int index = stage % kStages;
    return shared_.slots[flipped ? kStages - 1 - index : index];
  }

  __device__ __forceinline__ int64_t first_row(int stage) const {
    return place_.row + int64_t{stage} * (kItems * place_.row_step);
  }

  __device__ __forceinline__ void copy(const Sequence& sequence, int stage, bool flipped) {
    const View& view = sequence.view;
    const int64_t first = first_row(stage);
    Slots& slots = slots_of(stage, flipped);
    const Element* gGrad = view.gGrad + first * view.grad_stride;
    const Element* gP = view.gP + first * view.p_stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i * place_.row_step < view.len) {
        copy_vector(slots[i][0][threadIdx.x], gGrad);
        copy_vector(slots[i][1][threadIdx.x], gP);
      }
      gGrad += place_.row_step * view.grad_stride;
      gP += place_.row_step * view.p_stride;
    }
    ptx::cp_async_commit();
    ++started_;
  }

  static __device__ __forceinline__ void copy_vector(unsigned char* slot, const Element* global) {
    if constexpr (sizeof(Loaded) == 16) {
      ptx::cp_async_16(slot, global, 16);
    } else {
      ptx::cp_async_8(slot, global, 8);
    }
  }

  // Until the oldest stage that nobody has waited for is there.
  __device__ __forceinline__ void wait() {
    ++awaited_;
    const int behind = started_ - awaited_;
    if (behind == kStages - 1) {
      ptx::cp_async_wait<kStages - 1>();
    } else if (behind == 1) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
  }

  // Calls visit(dp, p, row) for the thread's rows of a stage, in order.
  template <typename Visit>
  __device__ __forceinline__ void for_each_row(const Sequence& sequence, int stage,
                                               Visit visit) const {
    const int64_t first = first_row(stage);
    const Slots& slots = slots_of(stage, flipped_);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t row = first + i * place_.row_step;
      if (row < sequence.view.len) {
        visit(*reinterpret_cast<const Loaded*>(slots[i][0][threadIdx.x]),
              *reinterpret_cast<const Loaded*>(slots[i][1][threadIdx.x]), row);
      }
    }
  }

  Storage& shared_;
  const Place& place_;
  bool flipped_ = false;  // of the sequence that is taken
  int started_ = 0;       // stages whose copies have been started
  int awaited_ = 0;       // of these, stages that are there
};

// ---- Kernels -----------------------------------------------------------------------------------

template <typename Params>
struct SoftmaxLaunch {
  Params params;
  int lanes_log2;  // vectors of a row that a group of columns holds
  int seqs_each;   // sequences of a CTA
};

// Up to kWarps sequences from `first` on. All threads of a warp make it together.
class SequenceList {
 public:
  template <typename Params>
  __device__ __forceinline__ SequenceList(const SoftmaxLaunch<Params>& launch, int64_t first) {
    const OffsetsView& offsets = launch.params.offsets;
    const int lane = threadIdx.x % 32;
    if (lane < launch.seqs_each && first + lane < offsets.num_seqs) {
      own_ = sequence_rows(offsets, first + lane);
    }
    const bool is_long = own_.len > (32 * kItems) >> launch.lanes_log2;
    long_ones_ = __ballot_sync(kAllLanes, is_long);
  }

  // The sequence that this warp takes alone; no rows where there is none.
  __device__ __forceinline__ RowRange of_warp() const {
    const int warp = threadIdx.x / 32;
    const RowRange range = rows_of(warp);
    return (long_ones_ >> warp & 1) == 0 ? range : RowRange{0, 0};
  }

  // The next one that the CTA takes together, without rows behind the last.
  __device__ __forceinline__ RowRange next_of_cta() {
    if (long_ones_ == 0) return {0, 0};
    const RowRange range = rows_of(__ffs(static_cast<int>(long_ones_)) - 1);
    long_ones_ &= long_ones_ - 1;
    return range;
  }

 private:
  __device__ __forceinline__ RowRange rows_of(int i) const {
    return {__shfl_sync(kAllLanes, own_.begin, i), __shfl_sync(kAllLanes, own_.len, i)};
  }

  RowRange own_{0, 0};  // lane i: of sequence first + i
  unsigned long_ones_;  // those of the CTA that are left, a bit each
};

__device__ __forceinline__ void* result_of(const JaggedSoftmaxParams& params) { return params.out; }
__device__ __forceinline__ void* result_of(const JaggedSoftmaxBackwardParams& params) {
  return params.grad_x;
}

template <typename Element>
__device__ __forceinline__ void store_zeros(Element* global, int64_t begin, int64_t end) {
  const int64_t cta = blockIdx.y * int64_t{gridDim.x} + blockIdx.x;
  const int64_t step = int64_t{gridDim.x} * gridDim.y * kThreads;
  for (int64_t i = begin + cta * kThreads + threadIdx.x; i < end; i += step) {
    global[i] = from_sum<Element>(0);
  }
}

// Per SM, as registers allow.
template <typename Params, typename Element>
constexpr int kCtas = sizeof(Element) == 8                          ? 4
                      : std::is_same_v<Params, JaggedSoftmaxParams> ? 8
                                                                    : 6;

template <typename Params, typename Element, int kVector>
__global__ __launch_bounds__(kThreads, kCtas<Params, Element>) void jagged_softmax_kernel(
    const __grid_constant__ SoftmaxLaunch<Params> launch) {
  __shared__ SharedStorage shared;
  const Params& params = launch.params;
  const OffsetsView& offsets = params.offsets;
  const int warp = threadIdx.x / 32;
  const int64_t first_vector = int64_t{blockIdx.x} << launch.lanes_log2;
  const int64_t step = int64_t{gridDim.y} * launch.seqs_each;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.y} * launch.seqs_each; first < offsets.num_seqs;
       first += step) {
    // Lane i knows sequence first + i.
    RowRange own{0, 0};
    if (lane < launch.seqs_each && first + lane < offsets.num_seqs) {
      own = sequence_rows(offsets, first + lane);
    }
    const bool is_long = own.len > (32 * kItems) >> launch.lanes_log2;
    const auto rows_of = [&](int i) {
      return RowRange{__shfl_sync(kAllLanes, own.begin, i), __shfl_sync(kAllLanes, own.len, i)};
    };
    unsigned long_ones = __ballot_sync(kAllLanes, is_long);
    const RowRange short_one = rows_of(warp);
    if ((long_ones >> warp & 1) == 0 && short_one.len > 0) {
      softmax_short<Element, kVector>(
          params, short_one, Place(false, launch.lanes_log2, first_vector, kVector, params.columns),
          shared);
    }
#pragma unroll 1
    for (; long_ones != 0; long_ones &= long_ones - 1) {
      const RowRange range = rows_of(__ffs(static_cast<int>(long_ones)) - 1);
      const Place place(true, launch.lanes_log2, first_vector, kVector, params.columns);
      if (range.len <= place.row_step * kItems) {
        softmax_short<Element, kVector>(params, range, place, shared);
      } else {
        softmax_long<Element, kVector>(params, range, place, shared);
      }
    }
  }
  Element* gResult = static_cast<Element*>(result_of(params));
  store_zeros(gResult, 0, clamped_offset(offsets, 0) * params.columns);
  store_zeros(gResult, clamped_offset(offsets, offsets.num_seqs) * params.columns,
              offsets.total * params.columns);
}

template <typename Element, int kVector>
__global__
__launch_bounds__(kThreads, kRingCtas<kVector * sizeof(Element)>) void softmax_backward_ring_kernel(
    const __grid_constant__ SoftmaxLaunch<JaggedSoftmaxBackwardParams> launch) {
  using Ring = BackwardRing<Element, kVector>;
  using Sequence = typename Ring::Sequence;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Ring::Storage*>(dynamic_shared);
  const JaggedSoftmaxBackwardParams& params = launch.params;
  const int64_t first_vector = int64_t{blockIdx.x} << launch.lanes_log2;
  const int64_t step = int64_t{gridDim.y} * launch.seqs_each;
  const Place place(true, launch.lanes_log2, first_vector, kVector, params.columns);
  Ring ring(shared, place);
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.y} * launch.seqs_each; first < params.offsets.num_seqs;
       first += step) {
    SequenceList list(launch, first);
    Sequence sequence(params, list.next_of_cta(), place);
    ring.start(sequence, 0);
    if (const RowRange range = list.of_warp(); range.len > 0) {
      softmax_short<Element, kVector>(
          params, range, Place(false, launch.lanes_log2, first_vector, kVector, params.columns),
          shared.reduced);
    }
#pragma unroll 1
    while (sequence.stages > 0) {
      const Sequence next(params, list.next_of_cta(), place);
      ring.take(sequence, next);
      sequence = next;
    }
  }
  Element* gGradX = static_cast<Element*>(params.grad_x);
  store_zeros(gGradX, 0, clamped_offset(params.offsets, 0) * params.columns);
  store_zeros(gGradX, clamped_offset(params.offsets, params.offsets.num_seqs) * params.columns,
              params.offsets.total * params.columns);
}

template <typename Params, typename Element>
constexpr PathName kPath =
    PathName(std::is_same_v<Params, JaggedSoftmaxParams> ? "cuda.jagged_softmax."
                                                         : "cuda.jagged_softmax_backward.") +
    kElementName<Element>;

template <typename Element>
constexpr PathName kRingPath =
    PathName("cuda.jagged_softmax_backward.ring.") + kElementName<Element>;

template <typename Element, int kVector, typename Params>
cudaError_t launch_vector(const Params& params, cudaStream_t stream) {
  constexpr int kMaxLanes = std::min<int>(32, kGroupBytes / (kVector * sizeof(Element)));
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  int lanes_log2 = 0;
  while ((1 << lanes_log2) < std::min<int64_t>(vectors, kMaxLanes)) ++lanes_log2;
  const int64_t groups = (vectors + (int64_t{1} << lanes_log2) - 1) >> lanes_log2;
  const int64_t num_seqs = params.offsets.num_seqs;
  const int seqs_each = num_seqs > kManySeqs / std::min<int64_t>(groups, kManySeqs) ? kWarps : 1;
  const int64_t ctas = std::max<int64_t>(1, (num_seqs + seqs_each - 1) / seqs_each);
  const Grid grid{std::max<int64_t>(1, groups), std::min(ctas, Grid::kMaxY)};
  const SoftmaxLaunch<Params> own{params, lanes_log2, seqs_each};
  constexpr int kVectorBytes = kVector * sizeof(Element);
  if constexpr (std::is_same_v<Params, JaggedSoftmaxBackwardParams> && sizeof(Element) < 8 &&
                kVectorBytes >= 8) {
    if (params.offsets.total > kLongMean * num_seqs) {
      return launch<softmax_backward_ring_kernel<Element, kVector>>(
          own, grid, kThreads, sizeof(RingStorage<kVectorBytes>), stream, kRingPath<Element>);
    }
  }
  return launch<jagged_softmax_kernel<Params, Element, kVector>>(own, grid, kThreads, 0, stream,
                                                                 kPath<Params, Element>);
}

// Whether rows lie at multiples of 16 bytes.
bool is_aligned(const void* data, int64_t stride, int64_t columns, int64_t elem_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | (stride * elem_bytes) | (columns * elem_bytes)) %
             16 ==
         0;
}
bool is_aligned(const JaggedSoftmaxParams& params, int64_t elem_bytes) {
  return is_aligned(params.x, params.x_stride, params.columns, elem_bytes);
}
bool is_aligned(const JaggedSoftmaxBackwardParams& params, int64_t elem_bytes) {
  return is_aligned(params.grad_out, params.grad_out_stride, params.columns, elem_bytes) &&
         is_aligned(params.out, params.out_stride, params.columns, elem_bytes);
}

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
    if (!params.vectors) return launch_vector<Element, 1>(params, stream);
    if constexpr (kVector == 8) {
      if (params.columns <= kNarrow || !is_aligned(params, sizeof(Element))) {
        return launch_vector<Element, 4>(params, stream);
      }
    }
    return launch_vector<Element, kVector>(params, stream);
  });
}

}  // namespace

cudaError_t launch_jagged_softmax(const JaggedSoftmaxParams& params, cudaStream_t stream) {
  return launch_any(params, stream);
}

cudaError_t launch_jagged_softmax_backward(const JaggedSoftmaxBackwardParams& params,
                                           cudaStream_t stream) {
  return launch_any(params, stream);
}

}  // namespace jagged_cuda
