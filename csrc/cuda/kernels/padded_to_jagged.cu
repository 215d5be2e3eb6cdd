// padded_to_jagged: z_b[i] = x[b, i], and zeros beyond the padded length (rows/gather.cuh: mapping,
// ragged edges).
#include "cuda/kernels/padded_to_jagged.h"
#include "cuda/kernels/rows/gather.cuh"

namespace jagged_cuda {

cudaError_t launch_padded_to_jagged(const GatherParams& params, int unit_bytes,
                                    cudaStream_t stream) {
  return rows::launch_gather(params, unit_bytes, stream, "cuda.padded_to_jagged");
}

}  // namespace jagged_cuda
