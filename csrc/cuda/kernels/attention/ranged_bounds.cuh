// The kernel before ranged_dq and ranged_dkdv (ranged_backward.cuh): what each tile of queries
// sees, and the tables of their biases.
#pragma once

#include "cuda/kernels/attention/ranged_backward_tile.cuh"
#include "cuda/kernels/attention/visible.cuh"

namespace jagged_cuda::attention {

constexpr int kBoundsThreads = 128;

// The rows of find_tile_bounds' grid behind the first.
template <int kRows>
__device__ __forceinline__ void find_bias_tables(const AttentionBackwardParams& params,
                                                 int64_t index) {
  const TimeTiles times(params);
  const ScoreBias& bias = params.bias;
  const float unit = params.silu ? kLogitUnit<true> : kLogitUnit<false>;
  int kind = static_cast<int>(blockIdx.y) - 1;
  if (bias.position_table != nullptr) {
    if (kind < bias.position_heads) {
      PositionTable(params, kind)
          .fill(bias, kind, unit, blockIdx.x * kBoundsThreads + threadIdx.x,
                gridDim.x * kBoundsThreads);
      return;
    }
    kind -= bias.position_heads;
  }
  if (kind < 2) {
    const bool of_keys = kind == 1;
    const OffsetsView& offsets = of_keys ? params.kv_offsets : params.q_offsets;
    if (index >= offsets.total / kRows + offsets.num_seqs + 2) return;
    const JaggedTile tile = find_tile<kRows>(offsets, index);
    if (tile.seq < 0 || tile.row >= tile.rows.len) return;
    times.find_spans(of_keys, tile, of_keys ? bias.kv_time : bias.q_time);
  } else if (blockIdx.x == 0) {
    const int64_t table = kind - 2;
    times.tables[table].fill<kBoundsThreads>(
        bias, static_cast<const float*>(bias.time_table) + table * bias.time_buckets, unit);
  }
}

// Row y = 0 of the grid: a warp for each tile of kRows queries, what it sees. With position_bias
// some rows write its tables; with time_bias two find the spans of times of queries and keys, and
// each other one fills a table of cells.
template <int kRows>
__global__ __launch_bounds__(kBoundsThreads) void find_tile_bounds(
    const __grid_constant__ AttentionBackwardParams params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t index = int64_t{blockIdx.x} * (kBoundsThreads / 32) + threadIdx.x / 32;
  if (blockIdx.y > 0) {
    find_bias_tables<kRows>(params, index);
    return;
  }
  if (index >= params.q_offsets.total / kRows + params.q_offsets.num_seqs + 2) return;
  const JaggedTile tile = find_tile<kRows>(params.q_offsets, index);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int num_keys = static_cast<int>(used_rows(params, tile.seq).len);
  const WindowOf<int> window = sequence_window(params, num_keys - num_queries);
  const TileBounds bounds = TileBounds::of(params, window, tile.rows.begin + row, row,
                                           min(kRows, num_queries - row), num_keys);
  if (threadIdx.x % 32 == 0) static_cast<TileBounds*>(params.tile_bounds)[index] = bounds;
}

}  // namespace jagged_cuda::attention
