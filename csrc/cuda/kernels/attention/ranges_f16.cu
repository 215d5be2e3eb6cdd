#include "cuda/kernels/attention/ranges_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_ranges<__half>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
