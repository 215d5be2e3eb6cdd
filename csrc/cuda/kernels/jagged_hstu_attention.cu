// Which kernels jagged_hstu_attention takes: for 16-bit elements wgmma, forward for long sequences
// (takes_ranged_forward), backward for all (takes_ranged_backward), else mma.sync; plain FMA for f32
// and f64.
#include "cuda/kernels/jagged_hstu_attention.h"

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/element.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_hstu_attention(const AttentionParams& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    return attention::launch_forward_general<decltype(element)>(params, stream);
  });
}

cudaError_t launch_jagged_hstu_attention_backward(const AttentionBackwardParams& params,
                                                  cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    return attention::launch_backward_general<decltype(element)>(params, stream);
  });
}

}  // namespace jagged_cuda
