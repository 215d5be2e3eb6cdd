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
// Batches of long means go to another kernel, which reads long sequences once or little more and has the
// same bits (softmax/sequence_ring.cuh).
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
#include "cuda/kernels/softmax/sequence_forward.cuh"
#include "cuda/kernels/softmax/sequence_ring.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

using namespace sequence_softmax;

// Rows of no more elements than these go by vectors of 4, so that more threads share a column's sums.
constexpr int kNarrow = 16;
// Up to here, each sequence has a CTA of its own.
constexpr int kManySeqs = 2048;
// Of an H100: no more CTAs than run on these at once are few.
constexpr int kSms = 132;

using softmax::kAllLanes;

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
  store_zeros_outside<Element>(params);
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
  constexpr bool kForward = std::is_same_v<Params, JaggedSoftmaxParams>;
  if constexpr (sizeof(Element) < 8 && kVectorBytes >= (kForward ? 16 : 8)) {
    // Where there are as many CTAs as run at once, or few more, the kernel without a ring has more of
    // them; where there are fewer, the longest sequence is what takes time.
    const int64_t few = int64_t{kSms} * kRingCtas<Params, kVectorBytes>;
    const bool are_few = kVectorBytes == 16 && num_seqs * groups <= few;
    bool are_long = params.offsets.total > kLongMean<Params> * num_seqs;
    if (kForward && are_many)
      are_long = params.offsets.total << lanes_log2 > kLongVectors<Element> * num_seqs;
    if (are_long && (are_many || are_few)) {
      const int seqs_each = !are_many ? 1 : kVectorBytes == 16 ? 2 : kWarps;
      return launch<softmax_ring_kernel<Params, Element, kVector>>(
          SoftmaxLaunch<Params>{params, lanes_log2, seqs_each}, grid(seqs_each), kThreads,
          sizeof(RingStorage<Params, kVectorBytes>), stream, kRingPath<Params, Element>);
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
