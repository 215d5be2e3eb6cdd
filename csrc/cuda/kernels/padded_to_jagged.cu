// padded_to_jagged: z_b[i] = x[b, i], and zeros beyond the padded length (rows/gather.cuh: mapping,
// ragged edges).
#include "cuda/kernels/padded_to_jagged.h"
#include "cuda/kernels/rows/gather.cuh"

namespace jagged_cuda {

cudaError_t launch_padded_to_jagged(const PaddedToJaggedParams& params, cudaStream_t stream) {
  rows::GatherLaunch launch{};
  launch.x = params.x;
  launch.out = params.out;
  launch.offsets = params.offsets;
  launch.row_units = params.row_units;
  launch.seq_stride = params.x_seq_stride;
  launch.row_stride = params.x_row_stride;
  launch.limit = params.max_len;
  return rows::launch_gather(launch, params.unit_bytes, stream, "cuda.padded_to_jagged");
}

}  // namespace jagged_cuda
