// jagged_softmax, forward and backward, over the rows i of each sequence and for each column c:
//
//   m[c]     = max_j scale x[j, c]
//   p[i, c]  = exp(scale x[i, c] - m[c]) / sum_j exp(scale x[j, c] - m[c])
//   dx[i, c] = scale p[i, c] (dp[i, c] - sum_j dp[j, c] p[j, c])
//
// Grid: x, one CTA of 128 threads for each sequence, or for each 4 sequences of a large batch; y,
// groups of up to 32 vectors (4 elements, 2 of f64, or one where alignment forbids more) beside
// each other. The threads that share a sequence form a grid, columns fastest, so that a warp
// reads whole rows. Who shares it depends on its own length alone, so that results don't depend on
// the batch:
//   - up to 4 vectors for each lane of one warp: one warp; sums go by shuffles
//   - up to 4 vectors for each thread: the CTA, which keeps the sequence in registers: one pass
//   - longer: the CTA reads it twice, with a running maximum and sum the first time
//
// Shared memory: the partial results of 4 warps for 32 vectors, two buffers in turn (4,096 bytes).
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

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 4;      // vectors that a thread keeps in registers
constexpr int kMaxLanes = 32;  // vectors of a row beside each other
// Elements of a vector: 16 bytes of f32, but 8 of 16-bit types, whose sums fill the registers.
constexpr int kMaxVector = 4;
// Up to here, each sequence has a CTA of its own; 132 SMs hold 1,056 at once.
constexpr int kManySeqs = 2048;

struct SharedStorage {
  alignas(16) unsigned char partial[2][kWarps * kMaxLanes * kMaxVector * sizeof(float)];
};
static_assert(sizeof(SharedStorage) == 4096, "as the header says");

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float largest(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double largest(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float minus_infinity(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double minus_infinity(double) {
  return __longlong_as_double(0xfff0000000000000LL);
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

// Combines value[] of all threads at the place that hold the same column; every thread gets the
// result. `buffer` is 0 and 1 in turn.
template <int kVector, typename S, typename Combine>
__device__ __forceinline__ void reduce_rows(S (&value)[kVector], const Place& place,
                                            SharedStorage& shared, int buffer, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < place.lanes) break;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      value[e] = combine(value[e], __shfl_xor_sync(0xffffffffu, value[e], offset));
    }
  }
  if (place.in_cta) {
    using Partial = S[kWarps][kMaxLanes][kVector];
    static_assert(sizeof(Partial) <= sizeof(shared.partial[0]));
    Partial& sPartial = *reinterpret_cast<Partial*>(shared.partial[buffer]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < place.lanes) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sPartial[warp][lane][e] = value[e];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      S result = sPartial[0][lane & (place.lanes - 1)][e];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        result = combine(result, sPartial[w][lane & (place.lanes - 1)][e]);
      }
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
  S scale;

  __device__ __forceinline__ SoftmaxView(const JaggedSoftmaxParams& params, const RowRange& range,
                                         const Place& place)
      : gX(static_cast<const Element*>(params.x) + range.begin * params.x_stride + place.column),
        gOut(static_cast<Element*>(params.out) + range.begin * params.columns + place.column),
        x_stride(params.x_stride),
        columns(params.columns),
        len(place.exists ? range.len : 0),
        scale(static_cast<S>(params.scale)) {}

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
  const SoftmaxView<Element, kVector> view(params, range, place);
  const int len = static_cast<int>(view.len);
  S maximum[kVector], sum[kVector];
  S rX[kItems][kVector] =
      {};  // set at once, or their registers would live on from sequence to sequence
#pragma unroll
  for (int e = 0; e < kVector; ++e) maximum[e] = minus_infinity(S{}), sum[e] = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = place.row + i * place.row_step;
    if (row < len) {
      const auto loaded = view.load(row);
#pragma unroll
      for (int e = 0; e < kVector; ++e) rX[i][e] = to_sum(loaded.elems[e]);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (place.row + i * place.row_step < len) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) maximum[e] = largest(maximum[e], view.scale * rX[i][e]);
    }
  }
  reduce_rows(maximum, place, shared, 0, [](S a, S b) { return largest(a, b); });
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (place.row + i * place.row_step < len) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        rX[i][e] = exponential(fma(rX[i][e], view.scale, -maximum[e]));
        sum[e] += rX[i][e];
      }
    }
  }
  reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(1) / sum[e];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = place.row + i * place.row_step;
    if (row < len) view.store(rX[i], sum, row);
  }
}

// A longer one, read twice by the whole CTA.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_long(const JaggedSoftmaxParams& params,
                                             const RowRange& range, const Place& place,
                                             SharedStorage& shared) {
  using S = Sum<Element>;
  const SoftmaxView<Element, kVector> view(params, range, place);
  const S lowest = minus_infinity(S{});
  const int step = place.row_step;
  S maximum[kVector], sum[kVector], own[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) maximum[e] = lowest, sum[e] = S(0);

  // Each thread over its own rows, relative to the largest value that it has seen.
#pragma unroll 1
  for (int64_t first = place.row; first < view.len; first += kItems * step) {
    const int left =
        static_cast<int>(view.len - first < kItems * step ? view.len - first : kItems * step);
    typename SoftmaxView<Element, kVector>::Loaded rX[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) rX[i] = view.load(first + i * step);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      S greatest = maximum[e];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * step < left) greatest = largest(greatest, view.scale * to_sum(rX[i].elems[e]));
      }
      // So long as all is -inf, any finite shift gives the right sum of 0, where -inf would give
      // NaN.
      const S shift = greatest == lowest ? S(0) : greatest;
      sum[e] *= exponential(maximum[e] - shift);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * step < left) {
          sum[e] += exponential(fma(to_sum(rX[i].elems[e]), view.scale, -shift));
        }
      }
      maximum[e] = greatest;
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) own[e] = maximum[e];
  reduce_rows(maximum, place, shared, 0, [](S a, S b) { return largest(a, b); });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] *= exponential(own[e] - maximum[e]);
  reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(1) / sum[e];

#pragma unroll 2
  for (int64_t row = place.row; row < view.len; row += step) {
    const auto loaded = view.load(row);
    S rP[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      rP[e] = exponential(fma(to_sum(loaded.elems[e]), view.scale, -maximum[e]));
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
  const int len = static_cast<int>(view.len);
  typename View::Loaded rGrad[kItems] = {}, rP[kItems] = {};
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = place.row + i * place.row_step;
    if (row < len) view.load(rGrad[i], rP[i], row);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (place.row + i * place.row_step < len) View::add(sum, rGrad[i], rP[i]);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = place.row + i * place.row_step;
    if (row < len) view.store(sum, rGrad[i], rP[i], row);
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
#pragma unroll 2
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    View::add(sum, rGrad, rP);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
#pragma unroll 2
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    view.store(sum, rGrad, rP, row);
  }
  __syncthreads();
}

// ---- Kernel ------------------------------------------------------------------------------------

template <typename Params>
struct SoftmaxLaunch {
  Params params;
  int lanes_log2;  // vectors of a row that a group of columns holds
  int64_t groups;  // of columns
  int seqs_each;   // sequences of a CTA
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

template <typename Params, typename Element, int kVector>
__global__ __launch_bounds__(kThreads, sizeof(Element) == 8 ? 4 : 8) void jagged_softmax_kernel(
    const __grid_constant__ SoftmaxLaunch<Params> launch) {
  __shared__ SharedStorage shared;
  const Params& params = launch.params;
  const OffsetsView& offsets = params.offsets;
  const int warp = threadIdx.x / 32;
  for (int64_t group = blockIdx.y; group < launch.groups; group += gridDim.y) {
    const int64_t first_vector = group << launch.lanes_log2;
    for (int i = 0; i < launch.seqs_each; ++i) {
      const int64_t seq = blockIdx.x * int64_t{launch.seqs_each} + i;
      if (seq >= offsets.num_seqs) break;
      const RowRange range = sequence_rows(offsets, seq);
      const bool in_cta = range.len > (32 * kItems) >> launch.lanes_log2;
      if (!in_cta && (warp != i || range.len == 0)) continue;
      const Place place(in_cta, launch.lanes_log2, first_vector, kVector, params.columns);
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
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  int lanes_log2 = 0;
  while ((1 << lanes_log2) < std::min<int64_t>(vectors, kMaxLanes)) ++lanes_log2;
  const int64_t groups = (vectors + (int64_t{1} << lanes_log2) - 1) >> lanes_log2;
  const int64_t grid_y = std::min(groups, Grid::kMaxY);
  const int64_t num_seqs = params.offsets.num_seqs;
  const int seqs_each = num_seqs > kManySeqs / grid_y ? kWarps : 1;
  const int64_t grid_x = std::max<int64_t>(1, (num_seqs + seqs_each - 1) / seqs_each);
  return launch<jagged_softmax_kernel<Params, Element, kVector>>(
      SoftmaxLaunch<Params>{params, lanes_log2, groups, seqs_each}, {grid_x, grid_y}, kThreads, 0,
      stream, kPath<Params, Element>);
}

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    constexpr int kVector = std::is_same_v<Element, double> ? 2 : 4;
    return params.vectors ? launch_vector<Element, kVector>(params, stream)
                          : launch_vector<Element, 1>(params, stream);
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
