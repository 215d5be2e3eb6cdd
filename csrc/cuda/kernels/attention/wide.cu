#include "cuda/kernels/attention/wide_backward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_wide<__nv_bfloat16>(const AttentionBackwardParams&,
                                                         cudaStream_t);
template cudaError_t launch_backward_wide<__half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
