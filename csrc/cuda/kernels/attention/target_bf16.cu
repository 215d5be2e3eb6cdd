#include "cuda/kernels/attention/target_backward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_target_forward<__nv_bfloat16>(const TargetAttentionParams&,
                                                          cudaStream_t);
template cudaError_t launch_target_backward<__nv_bfloat16>(const TargetAttentionBackwardParams&,
                                                           cudaStream_t);

}  // namespace jagged_cuda::attention
