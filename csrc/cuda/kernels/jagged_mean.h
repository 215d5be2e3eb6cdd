// jagged_mean on CUDA: the sum over the rows of each sequence, divided by their number.
#pragma once

#include "cuda/kernels/jagged_sum.h"

namespace jagged_cuda {

// The kernels of jagged_sum with `mean` set.
cudaError_t launch_jagged_mean(JaggedSumParams params, cudaStream_t stream);

}  // namespace jagged_cuda
