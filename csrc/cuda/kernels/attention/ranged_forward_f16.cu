#include "cuda/kernels/attention/ranged_forward.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_ranged<__half>(const AttentionParams&, cudaStream_t);

}  // namespace jagged_cuda::attention
