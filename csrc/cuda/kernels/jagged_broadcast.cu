// jagged_broadcast: z_b[i] = x[b] (rows/gather.cuh, with rows of x that repeat: mapping, ragged
// edges).
#include "cuda/kernels/jagged_broadcast.h"
#include "cuda/kernels/rows/gather.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_broadcast(const JaggedBroadcastParams& params, cudaStream_t stream) {
  rows::GatherLaunch launch{};
  launch.x = params.x;
  launch.out = params.out;
  launch.offsets = params.offsets;
  launch.row_units = params.row_units;
  launch.seq_stride = params.x_stride;
  launch.row_stride = 0;
  launch.limit = params.offsets.total;
  return rows::launch_gather(launch, params.unit_bytes, stream, "cuda.jagged_broadcast");
}

}  // namespace jagged_cuda
