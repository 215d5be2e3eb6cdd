// jagged_slice on CUDA: the plan that takes a range of the rows of each sequence.
#pragma once

#include "cuda/kernels/rows/ranges.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues up to three kernels that write index and offsets. No synchronisation.
cudaError_t launch_jagged_slice(const RangesParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
