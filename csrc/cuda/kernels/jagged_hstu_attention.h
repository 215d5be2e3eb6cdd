// The kernels of jagged_hstu_attention, as host code sees them: those of jagged_flash_attention, with
// params.silu.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda {

cudaError_t launch_jagged_hstu_attention(const AttentionParams& params, cudaStream_t stream);
cudaError_t launch_jagged_hstu_attention_backward(const AttentionBackwardParams& params,
                                                  cudaStream_t stream);

}  // namespace jagged_cuda
