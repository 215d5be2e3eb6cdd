// The kernel of jagged_dense_add, as host code sees it.
#pragma once

#include "cuda/kernels/rows/combine.h"
#include "cuda/kernels/rows/row_type.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_dense_add(const CombineParams& params, RowType type, cudaStream_t stream);

}  // namespace jagged_cuda
