#include "cuda/kernels/attention/tiny.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_tiny_f16(const AttentionParams& params, cudaStream_t stream) {
  return launch_forward_tiny<__half>(params, stream);
}

cudaError_t backward_tiny_f16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return launch_backward_tiny<__half>(params, stream);
}

}  // namespace jagged_cuda::attention
