#include "cuda/kernels/attention/backward_mma_sync.cuh"
#include "cuda/kernels/attention/backward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_wgmma<__half>(const AttentionBackwardParams&, BackwardPart,
                                                   cudaStream_t);
template cudaError_t launch_backward_mma_sync_dim<__half, 32>(const AttentionBackwardParams&,
                                                              cudaStream_t);
template cudaError_t launch_backward_mma_sync_dim<__half, 64>(const AttentionBackwardParams&,
                                                              cudaStream_t);

}  // namespace jagged_cuda::attention
