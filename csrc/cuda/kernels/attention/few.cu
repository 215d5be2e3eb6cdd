#include "cuda/kernels/attention/few_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_few<__nv_bfloat16>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_few<__half>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
