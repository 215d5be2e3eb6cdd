// jagged_hstu_attention takes the general kernels of jagged_flash_attention, by params.silu.
#include "cuda/kernels/jagged_hstu_attention.h"

namespace jagged_cuda {

cudaError_t launch_jagged_hstu_attention(const AttentionParams& params, cudaStream_t stream) {
  return launch_jagged_flash_attention(params, stream);
}

cudaError_t launch_jagged_hstu_attention_backward(const AttentionBackwardParams& params,
                                                  cudaStream_t stream) {
  return launch_jagged_flash_attention_backward(params, stream);
}

}  // namespace jagged_cuda
