// jagged_positions:
//
//   z_b[i] = min(i, L - targets), or from the end L - targets - min(i, L - targets)
//
// Grid: x, a warp for each virtual tile of kTileRows rows (prim/jagged.cuh), its lanes beside each
// other. No shared memory, no barriers, nothing read but offsets and targets. Rows outside every
// sequence, and those alone in their tile, become zeros.
#include "cuda/kernels/jagged_positions.h"

#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda {
namespace {

constexpr int kTileRows = 256;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

struct JaggedPositionsLaunch {
  JaggedPositionsParams params;
  int64_t tiles;
};

__global__ __launch_bounds__(kThreads) void positions_kernel(
    const __grid_constant__ JaggedPositionsLaunch launch) {
  const JaggedPositionsParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kTileRows>(params.offsets, index);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  // Outside, as if all rows were targets.
  const int64_t first_target =
      tile.seq < 0 ? 0 : tile.rows.len - clamped_count(params.targets, tile.seq, tile.rows.len);
  const bool from_end = params.from_end;
  int32_t* gOut = params.out + tile.rows.begin + tile.row;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < rows; i += 32) {
    const int64_t row = tile.row + i;
    const int64_t position = row < first_target ? row : first_target;
    gOut[i] = static_cast<int32_t>(from_end ? first_target - position : position);
  }
}

}  // namespace

cudaError_t launch_jagged_positions(const JaggedPositionsParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileRows);
  return launch<positions_kernel>(JaggedPositionsLaunch{params, tiles},
                                  {(tiles + kWarps - 1) / kWarps}, kThreads, 0, stream,
                                  "cuda.jagged_positions");
}

}  // namespace jagged_cuda
