// jagged_broadcast: z_b[i] = x[b] (rows/gather.cuh, with rows of x that repeat: mapping, ragged
// edges).
#include "cuda/kernels/jagged_broadcast.h"
#include "cuda/kernels/rows/gather.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_broadcast(const GatherParams& params, int unit_bytes,
                                    cudaStream_t stream) {
  return rows::launch_gather(params, unit_bytes, stream, "cuda.jagged_broadcast");
}

}  // namespace jagged_cuda
