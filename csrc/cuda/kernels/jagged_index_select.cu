// jagged_index_select: the plan that takes whole sequences by their numbers
// (rows/ranges.cuh: mapping, ragged edges).
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/rows/ranges.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_index_select(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_index_select");
}

}  // namespace jagged_cuda
