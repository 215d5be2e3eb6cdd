#include "cuda/kernels/attention/tf32_backward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_tf32<false>(const AttentionBackwardParams&, cudaStream_t);
template cudaError_t launch_backward_tf32<true>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
