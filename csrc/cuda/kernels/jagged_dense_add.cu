// jagged_dense_add: z_b[i] = x_b[i] + y[b, i], and x_b[i] alone from M on (rows/combine.cuh:
// mapping, ragged edges). Integers wrap around. Its gradients are rows/combine_backward.cuh's.
#include "cuda/kernels/jagged_dense_add.h"
#include "cuda/kernels/rows/combine_backward.cuh"

#include <type_traits>

namespace jagged_cuda {

cudaError_t launch_jagged_dense_add(const CombineParams& params, RowType type,
                                    cudaStream_t stream) {
  return rows::with_row_type(type, [&](auto element) {
    using Given = decltype(element);
    // Bytes wrap around to the same bits with a sign and without.
    using Element = std::conditional_t<std::is_same_v<Given, int8_t>, uint8_t, Given>;
    return rows::launch_combine<rows::Add, Element>(params, stream, "cuda.jagged_dense_add");
  });
}

cudaError_t launch_jagged_dense_add_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream) {
  return rows::launch_combine_backward<rows::Add>(params, stream, "cuda.jagged_dense_add_backward");
}

}  // namespace jagged_cuda
