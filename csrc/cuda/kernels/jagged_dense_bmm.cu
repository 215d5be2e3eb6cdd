// jagged_dense_bmm: choice of the arithmetic, and the kernel for fp64.
//
// fp64: z_b = activation(x_b y_b + bias_b) in tiles of 16 rows (gemm/fp64.cuh: mapping, shared
// memory, barriers). Grid: x, the virtual tiles of 16 rows; each CTA walks N in steps of 16. Empty
// tiles return at once, rows outside every sequence become zeros, as they are a product with K = 0.
#include "cuda/kernels/gemm/fp64.cuh"
#include "cuda/kernels/jagged_dense_bmm.cuh"

namespace jagged_cuda {
namespace gemm {

extern template cudaError_t launch_math<Bf16>(const JaggedDenseBmmParams&, cudaStream_t);
extern template cudaError_t launch_math<Fp16>(const JaggedDenseBmmParams&, cudaStream_t);
extern template cudaError_t launch_math<Tf32>(const JaggedDenseBmmParams&, cudaStream_t);
extern template cudaError_t launch_math<Fp32>(const JaggedDenseBmmParams&, cudaStream_t);

namespace {

__global__ __launch_bounds__(kThreadsFp64) void jagged_dense_bmm_fp64_kernel(
    const __grid_constant__ JaggedDenseBmmParams params) {
  const JaggedTile tile = find_tile<kTileFp64>(params.offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int64_t rows = tile.rows.len - tile.row, global_row = tile.rows.begin + tile.row;
  const int64_t depth = tile.seq < 0 ? 0 : params.inner;
  const double* gX = static_cast<const double*>(params.x) + global_row * params.x_stride;
  const double* gY = static_cast<const double*>(params.y) + tile.seq * params.y_seq_stride;
  const int64_t along_k = params.y_along_inner ? 1 : params.y_stride;
  const int64_t along_n = params.y_along_inner ? params.y_stride : 1;
  const int row = threadIdx.x / kTileFp64, column = threadIdx.x % kTileFp64;
  for (int64_t n = 0; n < params.columns; n += kTileFp64) {
    const double sum = multiply_fp64({gX, params.x_stride, 1}, {gY + n * along_n, along_k, along_n},
                                     rows, params.columns - n, depth);
    if (row < rows && n + column < params.columns) {
      double result = 0.0;
      if (tile.seq >= 0) {
        const double* gBias = static_cast<const double*>(params.bias);
        const double bias =
            gBias != nullptr ? gBias[tile.seq * params.bias_stride + n + column] : 0.0;
        result = activate(sum + bias, params.activation);
      }
      static_cast<double*>(params.out)[(global_row + row) * params.columns + n + column] = result;
    }
  }
}

cudaError_t launch_fp64(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileFp64);
  return launch<jagged_dense_bmm_fp64_kernel>(params, dim3(static_cast<unsigned>(tiles)),
                                              kThreadsFp64, 0, stream);
}

}  // namespace
}  // namespace gemm

cudaError_t launch_jagged_dense_bmm(const JaggedDenseBmmParams& params, cudaStream_t stream) {
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
