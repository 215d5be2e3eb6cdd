#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/forward_wgmma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_wgmma<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_mma_sync<__half>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
