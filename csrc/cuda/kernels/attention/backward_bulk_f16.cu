#include "cuda/kernels/attention/backward_items.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_backward_bulk<__half>(const AttentionBackwardParams&, BackwardPart,
                                                  cudaStream_t);

}  // namespace jagged_cuda::attention
