#include "cuda/kernels/attention/tf32_long_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_plan<float>(AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_long<float>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
