#include "cuda/kernels/attention/tf32_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_tf32<false>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_tf32<true>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
