#include "cuda/kernels/attention/backward_mma_sync.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_mma_sync_dim<__half, 128>(const AttentionBackwardParams&,
                                                               cudaStream_t);
template cudaError_t launch_backward_mma_sync_dim<__half, 256>(const AttentionBackwardParams&,
                                                               cudaStream_t);

}  // namespace jagged_cuda::attention
