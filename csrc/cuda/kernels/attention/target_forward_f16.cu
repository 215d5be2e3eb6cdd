#include "cuda/kernels/attention/target_forward.cuh"

namespace jagged_cuda::attention {

cudaError_t target_forward_f16(const TargetAttentionParams& params, cudaStream_t stream) {
  return launch_target_forward_of<__half>(params, stream);
}

}  // namespace jagged_cuda::attention
