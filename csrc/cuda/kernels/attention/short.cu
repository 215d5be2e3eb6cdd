#include "cuda/kernels/attention/short_backward.cuh"
#include "cuda/kernels/attention/short_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_short<__nv_bfloat16>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_short<__nv_bfloat16>(const AttentionBackwardParams&,
                                                          cudaStream_t);
template cudaError_t launch_forward_short<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_short<__half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
