#include "cuda/kernels/attention/target_forward.cuh"

namespace jagged_cuda::attention {

cudaError_t target_forward_bf16(const TargetAttentionParams& params, cudaStream_t stream) {
  return launch_target_forward_of<__nv_bfloat16>(params, stream);
}

}  // namespace jagged_cuda::attention
