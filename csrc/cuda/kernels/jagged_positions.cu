// jagged_positions:
//
//   z_b[i] = min(i, L - targets), or from the end L - targets - min(i, L - targets)
//
// Grid: x, a warp for each kWarpRows rows, of whichever sequences, 32 at a time: each lane finds the
// place of one (rows/places.cuh), and loads are coalesced. No shared memory, no barriers; nothing is
// read but offsets and targets. Rows outside every sequence become zeros.
#include "cuda/kernels/jagged_positions.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/places.cuh"

namespace jagged_cuda {
namespace {

constexpr int kWarpRows = 128;  // which take one search
constexpr int kThreads = 128;
constexpr int kCtaRows = kThreads / 32 * kWarpRows;

__global__ __launch_bounds__(kThreads) void positions_kernel(const JaggedPositionsParams params) {
  const int64_t begin = (blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32) * kWarpRows;
  if (begin >= params.offsets.total) return;
  Segment segment = rows::segment_of_row(params.offsets, begin);
#pragma unroll 1
  for (int64_t first = begin; first < begin + kWarpRows; first += 32) {
    const rows::Place place = rows::find_places(params.offsets, first, segment);
    const int64_t row = first + threadIdx.x % 32;
    if (row >= params.offsets.total) continue;
    int64_t position = 0;
    if (place.seq >= 0) {
      const int64_t len = sequence_rows(params.offsets, place.seq).len;
      const int64_t history = len - clamped_count(params.targets, place.seq, len);
      position = place.row < history ? place.row : history;
      if (params.from_end) position = history - position;
    }
    params.out[row] = static_cast<int32_t>(position);
  }
}

}  // namespace

cudaError_t launch_jagged_positions(const JaggedPositionsParams& params, cudaStream_t stream) {
  return launch<positions_kernel>(params, {(params.offsets.total + kCtaRows - 1) / kCtaRows},
                                  kThreads, 0, stream, "cuda.jagged_positions");
}

}  // namespace jagged_cuda
