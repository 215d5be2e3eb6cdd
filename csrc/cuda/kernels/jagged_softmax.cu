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
// Gradients of batches of long means go to another kernel, which reads long sequences once or little more
// and has the same bits (softmax/sequence_ring.cuh).
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
#include "cuda/kernels/softmax/sequence_backward.cuh"
#include "cuda/kernels/softmax/sequence_ring.cuh"
#include "cuda/kernels/softmax/words.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

using namespace sequence_softmax;

// Rows of no more elements than these go by vectors of 4, so that more threads share a column's sums.
constexpr int kNarrow = 16;
// Up to here, each sequence has a CTA of its own.
constexpr int kManySeqs = 2048;
// No more CTAs than these run at once, each with a ring.
constexpr int kFewCtas = 528;

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

// ---- Kernel- -----------------------------------------------------------------------------------

__device__ __forceinline__ void* result_of(const JaggedSoftmaxParams& params) { return params.out; }
__device__ __forceinline__ void* result_of(const JaggedSoftmaxBackwardParams& params) {
  return params.grad_x;
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

template <typename Params, typename Element>
constexpr PathName kPath =
    PathName(std::is_same_v<Params, JaggedSoftmaxParams> ? "cuda.jagged_softmax."
                                                         : "cuda.jagged_softmax_backward.") +
    kElementName<Element>;

template <typename Element, int kVector, typename Params>
cudaError_t launch_vector(const Params& params, cudaStream_t stream) {
  constexpr int kMaxLanes = std::min<int>(32, kGroupBytes / (kVector * sizeof(Element)));
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  int lanes_log2 = 0;
  while ((1 << lanes_log2) < std::min<int64_t>(vectors, kMaxLanes)) ++lanes_log2;
  const int64_t groups = (vectors + (int64_t{1} << lanes_log2) - 1) >> lanes_log2;
  const int64_t num_seqs = params.offsets.num_seqs;
  const bool are_many = num_seqs > kManySeqs / std::min<int64_t>(groups, kManySeqs);
  const auto grid = [&](int seqs_each) {
    const int64_t ctas = std::max<int64_t>(1, (num_seqs + seqs_each - 1) / seqs_each);
    return Grid{std::max<int64_t>(1, groups), std::min(ctas, Grid::kMaxY)};
  };
  constexpr int kVectorBytes = kVector * sizeof(Element);
  if constexpr (std::is_same_v<Params, JaggedSoftmaxBackwardParams> && sizeof(Element) < 8 &&
                kVectorBytes >= 8) {
    // Where there are as many CTAs as run at once, or few more, the kernel without a ring has more of
    // them; where there are fewer, the longest sequence is what takes time.
    const bool are_few = kVectorBytes == 16 && num_seqs * groups <= kFewCtas;
    if (params.offsets.total > kLongMean * num_seqs && (are_many || are_few)) {
      const int seqs_each = !are_many ? 1 : kVectorBytes == 16 ? 2 : kWarps;
      return launch<softmax_backward_ring_kernel<Element, kVector>>(
          SoftmaxLaunch<Params>{params, lanes_log2, seqs_each}, grid(seqs_each), kThreads,
          sizeof(RingStorage<kVectorBytes>), stream, kRingPath<Element>);
    }
  }
  const int seqs_each = are_many ? kWarps : 1;
  return launch<jagged_softmax_kernel<Params, Element, kVector>>(
      SoftmaxLaunch<Params>{params, lanes_log2, seqs_each}, grid(seqs_each), kThreads, 0, stream,
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
