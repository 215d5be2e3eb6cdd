#include "cuda/kernels/attention/tiny_wide_backward.cuh"
#include "cuda/kernels/attention/tiny_wide_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_tiny_wide<__nv_bfloat16>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_tiny_wide<__nv_bfloat16>(const AttentionBackwardParams&,
                                                              cudaStream_t);
template cudaError_t launch_forward_tiny_wide<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_tiny_wide<__half>(const AttentionBackwardParams&,
                                                       cudaStream_t);

}  // namespace jagged_cuda::attention
