// jagged_slice: the plan that takes a range of the rows of each sequence
// (rows/ranges.cuh: mapping, ragged edges).
#include "cuda/kernels/jagged_slice.h"
#include "cuda/kernels/rows/ranges.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_slice(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_slice");
}

}  // namespace jagged_cuda
