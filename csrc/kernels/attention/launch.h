// One function a path and element type, each in a file of its own so that they compile in parallel.
// All launch for every head dim up to 256 and return the launch error.
#pragma once

#include "kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// Head dims that kernels are compiled for; D and Dv are rounded up to the next.
constexpr int kDims[] = {32, 64, 128, 256};

inline int dim_bucket(const AttentionParams& params) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  for (int bucket : kDims) {
    if (dim <= bucket) return bucket;
  }
  return 0;
}

// 16-row blocks of a warp in the mma.sync kernels: 2 where sequences are long on average, which is
// all that the host knows of their lengths, so that tiles of 128 rows are seldom half empty. Larger
// head dims leave fewer registers, and gain later.
inline int row_blocks(const AttentionParams& params) {
  const int64_t long_rows = dim_bucket(params) <= 64 ? 192 : 768;
  return params.q_offsets.total >= long_rows * params.q_offsets.num_seqs ? 2 : 1;
}

cudaError_t forward_mma_sync_f16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_mma_sync_bf16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_simt_f32(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_simt_f64(const AttentionParams& params, cudaStream_t stream);

cudaError_t backward_mma_sync_f16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_mma_sync_bf16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_simt_f32(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_simt_f64(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace jagged_cuda::attention
