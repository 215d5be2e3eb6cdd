#include "cuda/kernels/attention/tiny_backward.cuh"
#include "cuda/kernels/attention/tiny_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_tiny<__nv_bfloat16>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_tiny<__nv_bfloat16>(const AttentionBackwardParams&,
                                                         cudaStream_t);
template cudaError_t launch_forward_tiny<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_tiny<__half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
