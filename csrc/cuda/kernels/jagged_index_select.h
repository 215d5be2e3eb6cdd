// jagged_index_select on CUDA: the plan that takes whole sequences by their numbers.
#pragma once

#include "cuda/kernels/rows/ranges.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues up to three kernels that write index and offsets. No synchronisation.
cudaError_t launch_jagged_index_select(const RangesParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
