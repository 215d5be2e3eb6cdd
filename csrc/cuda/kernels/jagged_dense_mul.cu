// jagged_dense_mul: z_b[i] = x_b[i] y[b, i], and 0 from M on (rows/combine.cuh: mapping, ragged
// edges); its gradients (rows/combine_backward.cuh); and that of its dense operand alone:
//
//   dy[b, i] = dz_b[i] x_b[i] for i < L, else 0
//
// likewise with a warp for each kRows rows of its result, taken as [B * M] rows: each lane finds
// the sequence and row of one. One row of y belongs to one row of x, so that nothing is
// summed: deterministic.
#include "cuda/kernels/jagged_dense_mul.h"
#include "cuda/kernels/rows/combine_backward.cuh"

namespace jagged_cuda {
namespace {

using rows::kRows;
using rows::kThreads;
using rows::kWarps;

struct PaddedProductLaunch {
  PaddedProductParams params;
  int lanes_log2;
};

template <typename Element, int kVector>
__global__ __launch_bounds__(kThreads, rows::kCombineCtas) void multiply_to_padded(
    const __grid_constant__ PaddedProductLaunch launch) {
  const PaddedProductParams& params = launch.params;
  const int64_t max_len = params.max_len;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  const int64_t left = params.offsets.num_seqs * max_len - begin;
  if (left <= 0) return;
  const int rows = left < kRows ? static_cast<int>(left) : kRows, lane = threadIdx.x % 32;
  int64_t grad_begin = rows::kNothing, x_begin = rows::kNothing;
  if (lane < rows) {
    const int64_t seq = (begin + lane) / max_len, row = (begin + lane) - seq * max_len;
    const RowRange range = sequence_rows(params.offsets, seq);
    if (row < range.len) {
      grad_begin = (range.begin + row) * params.grad_stride;
      x_begin = (range.begin + row) * params.x_stride;
    }
  }
  rows::combine_rows<rows::Multiply, Element, kVector>(
      static_cast<const Element*>(params.grad_out), grad_begin,
      static_cast<const Element*>(params.x), x_begin,
      static_cast<Element*>(params.grad_y) + begin * params.columns, rows, params.columns,
      launch.lanes_log2);
}

}  // namespace

cudaError_t launch_jagged_dense_mul(const CombineParams& params, ElementType type,
                                    cudaStream_t stream) {
  return with_element(type, [&](auto element) {
    return rows::launch_combine<rows::Multiply, decltype(element)>(params, stream,
                                                                   "cuda.jagged_dense_mul");
  });
}

cudaError_t launch_jagged_dense_mul_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream) {
  return rows::launch_combine_backward<rows::Multiply>(params, stream,
                                                       "cuda.jagged_dense_mul_backward");
}

cudaError_t launch_padded_product(const PaddedProductParams& params, cudaStream_t stream) {
  constexpr int64_t kCtaRows = int64_t{kWarps} * kRows;
  const int64_t ctas = (params.offsets.num_seqs * params.max_len + kCtaRows - 1) / kCtaRows;
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return rows::with_vector<Element>(params.vectors, [&](auto vector) {
      constexpr int kVector = sizeof(vector) / sizeof(Element);
      const PaddedProductLaunch arguments{
          params, rows::lanes_log2((params.columns + kVector - 1) / kVector)};
      return launch<multiply_to_padded<Element, kVector>>(arguments, {ctas}, kThreads, 0, stream,
                                                          "cuda.jagged_dense_mul_backward.y");
    });
  });
}

}  // namespace jagged_cuda
