// jagged2_softmax: choice of the element type and of the direction. Over columns and over rows are
// kernels of their own (softmax/over_columns.cuh, softmax/over_rows.cuh: mapping, shared memory,
// barriers).
#include "cuda/kernels/softmax/over_columns.cuh"
#include "cuda/kernels/softmax/over_rows.cuh"

namespace jagged_cuda {
namespace {

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return params.over_rows ? softmax::launch_over_rows<Element>(params, stream)
                            : softmax::launch_over_columns<Element>(params, stream);
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
