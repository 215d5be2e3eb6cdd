#include "cuda/kernels/attention/long_backward.cuh"
#include "cuda/kernels/attention/long_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_plan<__half>(AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_long<__half>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_long<__half>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
