#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/launch_wgmma.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_wgmma_bf16(const AttentionParams& params, cudaStream_t stream) {
  return for_wgmma_dim(params, [&](auto dim) {
    return launch_forward_wgmma<ForwardWgmmaConfig<__nv_bfloat16, dim.value>>(params, stream);
  });
}

}  // namespace jagged_cuda::attention
