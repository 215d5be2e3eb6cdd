// padded_to_jagged on CUDA: the rows of padded sequences one after another.
#pragma once

#include "cuda/kernels/rows/gather.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_padded_to_jagged(const GatherParams& params, int unit_bytes,
                                    cudaStream_t stream);

}  // namespace jagged_cuda
