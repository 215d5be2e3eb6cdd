#include "cuda/kernels/attention/ranges_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_ranges<__nv_bfloat16>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
