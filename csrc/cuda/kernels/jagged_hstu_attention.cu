// Which kernels jagged_hstu_attention takes: mma.sync for 16-bit elements, or wgmma in the backward
// pass (takes_ranged_backward), plain FMA for f32 and f64.
#include "cuda/kernels/jagged_hstu_attention.h"

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/element.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_hstu_attention(const AttentionParams& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) != 2) {
      return attention::launch_forward_fma<Element>(params, stream);
    } else {
      return attention::launch_forward_mma_sync<Element>(params, stream);
    }
  });
}

cudaError_t launch_jagged_hstu_attention_backward(const AttentionBackwardParams& params,
                                                  cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    return attention::launch_backward_general<decltype(element)>(params, stream);
  });
}

}  // namespace jagged_cuda
