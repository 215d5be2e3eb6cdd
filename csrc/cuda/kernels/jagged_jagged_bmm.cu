// jagged_jagged_bmm: the kernels of each arithmetic, and their choice.
//
// fp64: z_b = x_b^T y_b in tiles of 16 x 16 (gemm/fp64.cuh: mapping, shared memory, barriers).
// Grid: x, sequences times tiles of D; each CTA walks N in steps of 16. A sequence without rows
// gives zeros.
#include "cuda/kernels/gemm/fp64.cuh"
#include "cuda/kernels/jagged_jagged_bmm.cuh"

namespace jagged_cuda {
namespace gemm {
namespace {

__global__ __launch_bounds__(kThreadsFp64) void jagged_jagged_bmm_fp64_kernel(
    const __grid_constant__ JaggedJaggedBmmLaunch launch) {
  const JaggedJaggedBmmParams& params = launch.params;
  const int64_t seq = blockIdx.x / launch.tiles_m;
  const int64_t first = (blockIdx.x - seq * launch.tiles_m) * kTileFp64;  // column of x
  const RowRange range = sequence_rows(params.offsets, seq);
  const double* gX = static_cast<const double*>(params.x) + range.begin * params.x_stride + first;
  const double* gY = static_cast<const double*>(params.y) + range.begin * params.y_stride;
  const int row = threadIdx.x / kTileFp64, column = threadIdx.x % kTileFp64;
  for (int64_t n = 0; n < params.columns; n += kTileFp64) {
    const double sum = multiply_fp64({gX, 1, params.x_stride}, {gY + n, params.y_stride, 1},
                                     params.rows - first, params.columns - n, range.len);
    if (first + row < params.rows && n + column < params.columns) {
      static_cast<double*>(
          params.out)[(seq * params.rows + first + row) * params.columns + n + column] = sum;
    }
  }
}

cudaError_t launch_fp64(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  const int64_t tiles_m = (params.rows + kTileFp64 - 1) / kTileFp64;
  return launch<jagged_jagged_bmm_fp64_kernel>(
      JaggedJaggedBmmLaunch{params, tiles_m, params.columns},
      dim3(static_cast<unsigned>(params.offsets.num_seqs * tiles_m)), kThreadsFp64, 0, stream);
}

}  // namespace
}  // namespace gemm

cudaError_t launch_jagged_jagged_bmm(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  switch (params.math) {
    case gemm::Math::kBf16:
      return gemm::launch_math<gemm::Bf16>(params, stream);
    case gemm::Math::kFp16:
      return gemm::launch_math<gemm::Fp16>(params, stream);
    case gemm::Math::kTf32:
      return gemm::launch_math<gemm::Tf32>(params, stream);
    case gemm::Math::kFp32:
      return gemm::launch_math<gemm::Fp32>(params, stream);
    case gemm::Math::kFp64:
      return gemm::launch_fp64(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jagged_cuda
