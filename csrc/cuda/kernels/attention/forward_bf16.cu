#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/forward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_wgmma<__nv_bfloat16>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__nv_bfloat16, 32>(const AttentionParams&,
                                                                    cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__nv_bfloat16, 64>(const AttentionParams&,
                                                                    cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__nv_bfloat16, 128>(const AttentionParams&,
                                                                     cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__nv_bfloat16, 256>(const AttentionParams&,
                                                                     cudaStream_t);

}  // namespace jagged_cuda::attention
