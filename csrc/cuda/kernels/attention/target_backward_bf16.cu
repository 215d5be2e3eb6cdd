#include "cuda/kernels/attention/target_backward.cuh"

namespace jagged_cuda::attention {

cudaError_t target_backward_bf16(const TargetAttentionBackwardParams& params, cudaStream_t stream) {
  return launch_target_backward_of<__nv_bfloat16>(params, stream);
}

}  // namespace jagged_cuda::attention
