#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/forward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_wgmma<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__half, 32>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__half, 64>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__half, 128>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync_dim<__half, 256>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
