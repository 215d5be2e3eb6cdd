// The rows of a jagged result, each a copy of a row of its sequence's or zeros: padded_to_jagged
// and jagged_broadcast.
//
//   z_b[i] = x[b, i] for i < limit, else 0
//
// Grid: x, a warp for each virtual tile of kRows rows (prim/jagged.cuh). Lanes are beside each
// other along a row, in units of up to 16 bytes; what they leave over of the warp takes the next
// rows. No shared memory, no barriers. Tiles without rows return at once, rows outside every
// sequence become zeros, and a tile ends with its sequence.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/gather.h"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda::rows {

struct GatherLaunch {
  GatherParams params;
  int lanes_log2;
  int64_t tiles;
};

template <typename Unit>
__global__ __launch_bounds__(kThreads) void gather_kernel(
    const __grid_constant__ GatherLaunch launch) {
  const GatherParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kRows>(params.offsets, index);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kRows ? static_cast<int>(left) : kRows;
  const int64_t known = tile.seq < 0 ? 0 : params.limit - tile.row;
  const int copied = known < rows ? (known < 0 ? 0 : static_cast<int>(known)) : rows;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const Unit* gX = static_cast<const Unit*>(params.x) + tile.seq * params.seq_stride +
                   tile.row * params.row_stride;
  Unit* gOut = static_cast<Unit*>(params.out) + (tile.rows.begin + tile.row) * params.row_units;
  for (int64_t unit = lane & (lanes - 1); unit < params.row_units; unit += lanes) {
#pragma unroll 1
    for (int row = first; row < rows; row += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        rX[i] = Unit{};
        if (row + i * step < copied) {
          rX[i] = __ldg(gX + (row + i * step) * params.row_stride + unit);
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (row + i * step < rows) gOut[(row + i * step) * params.row_units + unit] = rX[i];
      }
    }
  }
}

inline cudaError_t launch_gather(const GatherParams& params, int unit_bytes, cudaStream_t stream,
                                 const char* path) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kRows);
  const GatherLaunch arguments{params, lanes_log2(params.row_units), tiles};
  return with_unit(unit_bytes, [&](auto unit) {
    return launch<gather_kernel<decltype(unit)>>(arguments, {(tiles + kWarps - 1) / kWarps},
                                                 kThreads, 0, stream, path);
  });
}

}  // namespace jagged_cuda::rows
