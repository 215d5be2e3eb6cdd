// jagged_sum and jagged_mean: choice of the element type (rows/sum.cuh: mapping, shared memory,
// barriers).
#include "cuda/kernels/rows/sum.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_sum(const JaggedSumParams& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    constexpr int kVector = 16 / sizeof(Element);
    return params.vectors ? rows::launch_sum_vector<Element, kVector>(params, stream)
                          : rows::launch_sum_vector<Element, 1>(params, stream);
  });
}

}  // namespace jagged_cuda
