// jagged_dense_mul: z_b[i] = x_b[i] y[b, i], and 0 from M on (rows/combine.cuh: mapping, ragged
// edges), and its gradients (rows/combine_backward.cuh).
#include "cuda/kernels/jagged_dense_mul.h"
#include "cuda/kernels/rows/combine_backward.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_dense_mul(const CombineParams& params, ElementType type,
                                    cudaStream_t stream) {
  return with_element(type, [&](auto element) {
    return rows::launch_combine<rows::Multiply, decltype(element)>(params, stream,
                                                                   "cuda.jagged_dense_mul");
  });
}

cudaError_t launch_jagged_dense_mul_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream) {
  return rows::launch_combine_backward<rows::Multiply>(params, stream,
                                                       "cuda.jagged_dense_mul_backward");
}

}  // namespace jagged_cuda
