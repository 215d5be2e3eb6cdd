#include "cuda/kernels/attention/fma.cuh"

namespace jagged_cuda::attention {

template cudaError_t launch_forward_fma<float>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_forward_fma<double>(const AttentionParams&, cudaStream_t);
template cudaError_t launch_backward_fma<float>(const AttentionBackwardParams&, cudaStream_t);
template cudaError_t launch_backward_fma<double>(const AttentionBackwardParams&, cudaStream_t);
template cudaError_t launch_table_gradients_fma<float>(const AttentionBackwardParams&,
                                                       cudaStream_t);
template cudaError_t launch_table_gradients_fma<double>(const AttentionBackwardParams&,
                                                        cudaStream_t);

}  // namespace jagged_cuda::attention
