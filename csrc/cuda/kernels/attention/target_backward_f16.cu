#include "cuda/kernels/attention/target_backward.cuh"

namespace jagged_cuda::attention {

cudaError_t target_backward_f16(const TargetAttentionBackwardParams& params, cudaStream_t stream) {
  return launch_target_backward_of<__half>(params, stream);
}

}  // namespace jagged_cuda::attention
