// Choosing and launching the kernels of jagged_target_attention: one function an element type, in a
// file of its own so that they compile in parallel.
#pragma once

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/jagged_target_attention.h"

namespace jagged_cuda::attention {

inline int target_dim_bucket(const TargetAttentionParams& params) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  for (int bucket : kDims) {
    if (dim <= bucket) return bucket;
  }
  return 0;
}

inline int64_t target_rows(const TargetAttentionParams& params) {
  return int64_t{params.num_queries} * (params.heads / params.kv_heads);
}

// Rows of a tile, by the rows of a key/value head; 256 dims have 64 in place of 128.
inline int target_forward_rows(const TargetAttentionParams& params) {
  const int64_t rows = target_rows(params);
  return rows <= 16 ? 16 : (rows <= 32 ? 32 : 128);
}
inline int target_backward_tile(const TargetAttentionParams& params) {
  return target_rows(params) <= 32 ? 32 : 128;
}

cudaError_t target_forward_f16(const TargetAttentionParams& params, cudaStream_t stream);
cudaError_t target_forward_bf16(const TargetAttentionParams& params, cudaStream_t stream);
cudaError_t target_backward_f16(const TargetAttentionBackwardParams& params, cudaStream_t stream);
cudaError_t target_backward_bf16(const TargetAttentionBackwardParams& params, cudaStream_t stream);

}  // namespace jagged_cuda::attention
