// jagged_dense_mul: z_b[i] = x_b[i] y[b, i], and 0 from M on (rows/combine.cuh: mapping, ragged
// edges); and the gradient of its dense operand:
//
//   dy[b, i] = dz_b[i] x_b[i] for i < L, else 0
//
// whose grid is that of jagged_to_padded: x, a warp for each kRows rows of the result, taken as
// [B * M] rows. One row of y belongs to one row of x, so that nothing is summed: deterministic. No
// shared memory, no barriers, and nothing ragged but the last rows of the result.
#include "cuda/kernels/jagged_dense_mul.h"
#include "cuda/kernels/rows/combine.cuh"

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

struct DenseMulBackwardLaunch {
  DenseMulBackwardParams params;
  int lanes_log2;
};

template <typename Element, int kVector>
__global__ __launch_bounds__(kThreads) void multiply_to_padded(
    const __grid_constant__ DenseMulBackwardLaunch launch) {
  using Loaded = Vector<Element, kVector>;
  const DenseMulBackwardParams& params = launch.params;
  const int64_t max_len = params.max_len, total_rows = params.offsets.num_seqs * max_len;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  if (begin >= total_rows) return;
  const int rows = total_rows - begin < kRows ? static_cast<int>(total_rows - begin) : kRows;
  const int64_t first_seq = begin / max_len, first_row = begin - first_seq * max_len;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const Element* gGrad = static_cast<const Element*>(params.grad_out);
  const Element* gX = static_cast<const Element*>(params.x);
  Element* gOut = static_cast<Element*>(params.grad_y) + begin * params.columns;
  for (int64_t column = (lane & (lanes - 1)) * kVector; column < params.columns;
       column += lanes * kVector) {
#pragma unroll 1
    for (int i = first; i < rows; i += kItems * step) {
      Loaded rGrad[kItems], rX[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        rGrad[item] = rX[item] = Loaded{};
        if (i + item * step >= rows) continue;
        int64_t seq = first_seq, row = first_row + i + item * step;
        if (row >= max_len) {  // with few rows per sequence, the warp holds several
          const int64_t passed =
              max_len >= kRows ? 1 : static_cast<int>(row) / static_cast<int>(max_len);
          seq += passed;
          row -= passed * max_len;
        }
        const RowRange range = sequence_rows(params.offsets, seq);
        if (row < range.len) {
          const int64_t global_row = range.begin + row;
          rGrad[item] =
              rows::load_vector<Element, kVector>(gGrad + global_row * params.grad_stride + column);
          rX[item] =
              rows::load_vector<Element, kVector>(gX + global_row * params.x_stride + column);
        }
      }
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (i + item * step < rows) {
          *reinterpret_cast<Loaded*>(gOut + (i + item * step) * params.columns + column) =
              rows::combine<rows::Multiply>(rGrad[item], rX[item]);
        }
      }
    }
  }
}

}  // namespace

cudaError_t launch_jagged_dense_mul(const CombineParams& params, ElementType type,
                                    cudaStream_t stream) {
  return with_element(type, [&](auto element) {
    return rows::launch_combine<rows::Multiply, decltype(element)>(params, stream,
                                                                   "cuda.jagged_dense_mul");
  });
}

cudaError_t launch_jagged_dense_mul_backward(const DenseMulBackwardParams& params,
                                             cudaStream_t stream) {
  constexpr int64_t kCtaRows = int64_t{kWarps} * kRows;
  const int64_t ctas = (params.offsets.num_seqs * params.max_len + kCtaRows - 1) / kCtaRows;
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return rows::with_vector<Element>(params.vectors, [&](auto vector) {
      constexpr int kVector = sizeof(vector) / sizeof(Element);
      const DenseMulBackwardLaunch arguments{
          params, rows::lanes_log2((params.columns + kVector - 1) / kVector)};
      return launch<multiply_to_padded<Element, kVector>>(arguments, {ctas}, kThreads, 0, stream,
                                                          "cuda.jagged_dense_mul_backward");
    });
  });
}

}  // namespace jagged_cuda
