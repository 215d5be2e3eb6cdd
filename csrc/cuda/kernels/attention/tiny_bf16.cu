#include "cuda/kernels/attention/tiny.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_tiny_bf16(const AttentionParams& params, cudaStream_t stream) {
  return launch_forward_tiny<__nv_bfloat16>(params, stream);
}

cudaError_t backward_tiny_bf16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return launch_backward_tiny<__nv_bfloat16>(params, stream);
}

}  // namespace jagged_cuda::attention
