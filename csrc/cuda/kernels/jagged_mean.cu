// jagged_mean: jagged_sum whose last step divides (rows/sum.cuh).
#include "cuda/kernels/jagged_mean.h"

namespace jagged_cuda {

cudaError_t launch_jagged_mean(JaggedSumParams params, cudaStream_t stream) {
  params.mean = true;
  return launch_jagged_sum(params, stream);
}

}  // namespace jagged_cuda
