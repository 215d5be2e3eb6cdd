// jagged_positions:
//
//   z_b[i] = min(i, L - targets), or from the end L - targets - min(i, L - targets)
//
// Two kernels, of which one is launched, by the mean length. Grid: x, for long sequences a warp for
// each virtual tile of kTileRows rows (prim/jagged.cuh), its lanes beside each other; for others a
// warp for each kWarpRows rows, of whichever sequences, whose lanes find the places of four beside
// each other (rows/places.cuh). No shared memory, no barriers; nothing is read but offsets and
// targets. Rows outside every sequence become zeros.
#include "cuda/kernels/jagged_positions.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/places.cuh"

namespace jagged_cuda {
namespace {

constexpr int kTileRows = 256;
constexpr int kLaneRows = 4;               // one store of 16 bytes
constexpr int kWarpRows = 32 * kLaneRows;  // which take one search
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// How many rows of sequence `seq`, which has `len`, are no targets; outside, as if all were.
__device__ __forceinline__ int64_t history_of(const JaggedPositionsParams& params, int64_t seq,
                                              int64_t len) {
  return seq < 0 ? 0 : len - clamped_count(params.targets, seq, len);
}

__device__ __forceinline__ int32_t position_of(int64_t row, int64_t history, bool from_end) {
  const int64_t position = row < history ? row : history;
  return static_cast<int32_t>(from_end ? history - position : position);
}

struct JaggedPositionsLaunch {
  JaggedPositionsParams params;
  int64_t tiles;
};

__global__ __launch_bounds__(kThreads) void long_positions_kernel(
    const __grid_constant__ JaggedPositionsLaunch launch) {
  const JaggedPositionsParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kTileRows>(params.offsets, index);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  const int64_t history = history_of(params, tile.seq, tile.rows.len);
  const bool from_end = params.from_end;
  int32_t* gOut = params.out + tile.rows.begin + tile.row;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < rows; i += 32) {
    gOut[i] = position_of(tile.row + i, history, from_end);
  }
}

__global__ __launch_bounds__(kThreads, 8) void positions_kernel(
    const __grid_constant__ JaggedPositionsParams params) {
  const OffsetsView& offsets = params.offsets;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kWarpRows;
  if (begin >= offsets.total) return;
  const bool from_end = params.from_end;
  // Without targets, and from the beginning, a row's place is its position.
  const bool needs_len = from_end || params.targets.data != nullptr || params.targets.same != 0;
  rows::Place places[kLaneRows];
  rows::find_places(offsets, begin, places);
  int32_t positions[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const auto [seq, row] = places[i];
    positions[i] = seq < 0 ? 0 : static_cast<int32_t>(row);
    if (needs_len && seq >= 0) {
      const int64_t len = sequence_rows(offsets, seq).len;
      positions[i] = position_of(row, history_of(params, seq, len), from_end);
    }
  }
  const int64_t first = begin + kLaneRows * (threadIdx.x % 32);
  if (first + kLaneRows <= offsets.total) {
    *reinterpret_cast<int4*>(params.out + first) =
        make_int4(positions[0], positions[1], positions[2], positions[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (first + i < offsets.total) params.out[first + i] = positions[i];
    }
  }
}

}  // namespace

cudaError_t launch_jagged_positions(const JaggedPositionsParams& params, cudaStream_t stream) {
  const OffsetsView& offsets = params.offsets;
  if (offsets.total / kTileRows >= offsets.num_seqs / 2) {
    const int64_t tiles = num_tiles(offsets.total, offsets.num_seqs, kTileRows);
    return launch<long_positions_kernel>(JaggedPositionsLaunch{params, tiles},
                                         {(tiles + kWarps - 1) / kWarps}, kThreads, 0, stream,
                                         "cuda.jagged_positions");
  }
  constexpr int64_t kCtaRows = int64_t{kWarps} * kWarpRows;
  return launch<positions_kernel>(params, {(offsets.total + kCtaRows - 1) / kCtaRows}, kThreads, 0,
                                  stream, "cuda.jagged_positions");
}

}  // namespace jagged_cuda
