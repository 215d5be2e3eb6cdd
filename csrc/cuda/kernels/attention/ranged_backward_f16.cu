#include "cuda/kernels/attention/ranged_backward.cuh"

namespace jagged_cuda::attention {

// Compiled beside its kernels.
extern template cudaError_t launch_backward_mma_sync<__half>(const AttentionBackwardParams&,
                                                             cudaStream_t);
template cudaError_t launch_backward_ranged<__half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
