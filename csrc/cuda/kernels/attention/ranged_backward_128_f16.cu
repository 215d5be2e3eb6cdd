#include "cuda/kernels/attention/ranged_backward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_ranged_dim<__half, 128>(const AttentionBackwardParams&,
                                                             cudaStream_t);

}  // namespace jagged_cuda::attention
