// Choosing and launching the kernels of jagged_target_attention, instantiated for each 16-bit type
// in a file of its own, so that they compile in parallel.
#pragma once

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/jagged_target_attention.h"

namespace jagged_cuda::attention {

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

template <typename Element>
cudaError_t launch_target_forward(const TargetAttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_target_backward(const TargetAttentionBackwardParams& params,
                                   cudaStream_t stream);

}  // namespace jagged_cuda::attention
