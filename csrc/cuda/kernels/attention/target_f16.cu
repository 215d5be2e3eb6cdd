#include "cuda/kernels/attention/target_backward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_target_forward<__half>(const TargetAttentionParams&, cudaStream_t);
template cudaError_t launch_target_backward<__half>(const TargetAttentionBackwardParams&,
                                                    cudaStream_t);

}  // namespace jagged_cuda::attention
