// array_jagged_bmm_jagged_out: choice of the kernel, and the one for fp64.
//
// fp64: z_b = A_b y_b, or A_b^T y_b, in tiles of 16 rows (gemm/fp64.cuh: mapping, shared memory,
// barriers). Grid: x, the virtual tiles of 16 rows of the result; each CTA walks N in steps of 16.
// Empty tiles return at once; rows outside every sequence, and those of a matrix that does not fit,
// become zeros, as they are a product with K = 0.
#include "cuda/kernels/array_jagged_bmm_jagged_out.cuh"
#include "cuda/kernels/gemm/fp64.cuh"
#include "cuda/kernels/prim/wgmma_support.h"

#include <limits>

namespace jagged_cuda {
namespace gemm {

extern template cudaError_t launch_math<Bf16>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
extern template cudaError_t launch_math<Fp16>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
extern template cudaError_t launch_math<Tf32>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
extern template cudaError_t launch_math<Fp32>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);

cudaError_t launch_array_wgmma_bf16(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
cudaError_t launch_array_wgmma_f16(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);

namespace {

__global__ __launch_bounds__(kThreadsFp64) void array_jagged_bmm_jagged_out_fp64_kernel(
    const __grid_constant__ ArrayJaggedBmmJaggedOutParams params) {
  const MatricesView& matrices = params.matrices;
  const bool transpose = params.transpose;
  const JaggedTile tile =
      find_tile<kTileFp64>(transpose ? matrices.columns : matrices.rows, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int64_t rows = tile.rows.len - tile.row, global_row = tile.rows.begin + tile.row;
  int64_t depth = 0;
  OperandFp64 a{static_cast<const double*>(params.a), 0, 0};
  OperandFp64 y{static_cast<const double*>(params.y), params.y_stride, 1};
  if (tile.seq >= 0) {
    const Matrix matrix = find_matrix(matrices, tile.seq);
    const int64_t pitch = matrix.columns.len;
    if (matrix.fits) {
      depth = transpose ? matrix.rows.len : pitch;
      a.line_stride = transpose ? 1 : pitch;
      a.elem_stride = transpose ? pitch : 1;
      a.data += matrix.begin + tile.row * a.line_stride;
      y.data += (transpose ? matrix.rows.begin : matrix.columns.begin) * params.y_stride;
    }
  }
  double* gOut = static_cast<double*>(params.out) + global_row * params.columns;
  const int row = threadIdx.x / kTileFp64, column = threadIdx.x % kTileFp64;
  for (int64_t n = 0; n < params.columns; n += kTileFp64) {
    const double sum = multiply_fp64(a, y, rows, params.columns - n, depth);
    if (row < rows && n + column < params.columns) gOut[row * params.columns + n + column] = sum;
    y.data += kTileFp64;
  }
}

cudaError_t launch_fp64(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const MatricesView& matrices = params.matrices;
  const OffsetsView& rows = params.transpose ? matrices.columns : matrices.rows;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, kTileFp64);
  return launch<array_jagged_bmm_jagged_out_fp64_kernel>(params, dim3(static_cast<unsigned>(tiles)),
                                                         kThreadsFp64, 0, stream);
}

}  // namespace
}  // namespace gemm

bool takes_wgmma(const ArrayJaggedBmmJaggedOutParams& params) {
  // Half of wgmma's smallest tile, or less, is as fast without it.
  constexpr int64_t kMinColumns = 33, kMaxColumns = 1 << 20;
  constexpr int64_t kMaxRows = std::numeric_limits<int>::max() / 2;  // coordinates of copies
  const int64_t rows = params.matrices.rows.total, columns = params.matrices.columns.total;
  const int64_t y_rows = params.transpose ? rows : columns;
  return (params.math == gemm::Math::kBf16 || params.math == gemm::Math::kFp16) &&
         !params.mma_sync_only && params.y_vectors && params.columns % 8 == 0 &&
         params.columns >= kMinColumns && params.columns <= kMaxColumns && rows <= kMaxRows &&
         columns <= kMaxRows && (y_rows <= 1 || params.y_stride >= params.columns) && has_wgmma();
}

cudaError_t launch_array_jagged_bmm_jagged_out(const ArrayJaggedBmmJaggedOutParams& params,
                                               cudaStream_t stream) {
  if (takes_wgmma(params)) {
    return params.math == gemm::Math::kBf16 ? gemm::launch_array_wgmma_bf16(params, stream)
                                            : gemm::launch_array_wgmma_f16(params, stream);
  }
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
