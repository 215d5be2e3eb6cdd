// The kernels of jagged_dense_mul, as host code sees them.
#pragma once

#include "cuda/kernels/rows/combine.h"

#include "cuda/kernels/prim/element.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Each enqueues one kernel that writes every row of its results. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_dense_mul(const CombineParams& params, ElementType type,
                                    cudaStream_t stream);
cudaError_t launch_jagged_dense_mul_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream);

}  // namespace jagged_cuda
