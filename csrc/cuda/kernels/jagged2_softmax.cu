// jagged2_softmax: choice of the element type (softmax/spans.cuh: mapping, shared memory, barriers).
#include "cuda/kernels/softmax/spans.cuh"

namespace jagged_cuda {
namespace {

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    return softmax::launch_spans<decltype(element)>(params, stream);
  });
}

}  // namespace

cudaError_t launch_jagged2_softmax(const Jagged2SoftmaxParams& params, cudaStream_t stream) {
  return launch_any(params, stream);
}

cudaError_t launch_jagged2_softmax_backward(const Jagged2SoftmaxBackwardParams& params,
                                            cudaStream_t stream) {
  return launch_any(params, stream);
}

}  // namespace jagged_cuda
