// The kernels of jagged_dense_add, as host code sees them.
#pragma once

#include "cuda/kernels/rows/combine.h"
#include "cuda/kernels/rows/row_type.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Each enqueues one kernel that writes every row of its results. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_dense_add(const CombineParams& params, RowType type, cudaStream_t stream);
cudaError_t launch_jagged_dense_add_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream);

}  // namespace jagged_cuda
