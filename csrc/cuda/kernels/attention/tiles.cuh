// Tiles of queries and keys: which rows they are, and how they reach shared memory.
#pragma once

#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/ring.cuh"

namespace jagged_cuda::attention {

// Queries [row, row + rows) of one sequence.
struct QueryTile {
  int64_t global_row;  // in q
  int64_t key_begin;   // in k and v
  int row;
  int rows;  // 0: none
  int num_queries;
  int num_keys;
};

// Keys that a tile walks over, from a multiple of kTileN on.
struct KeyRange {
  int first;
  int last;
  __device__ __forceinline__ KeyRange(const QueryTile& tile, const WindowOf<int>& window, int step)
      : first(window.first_column(tile.row) / step * step),
        last(window.last_column(tile.row, tile.rows, tile.num_keys)) {}
};

// The end of those that a warpgroup's 64 rows from `row` of the tile on see, at least one.
__device__ __forceinline__ int own_last_key(const QueryTile& tile, const WindowOf<int>& window,
                                            const KeyRange& keys, int row) {
  const int last = window.last_column(tile.row + row, min(64, tile.rows - row), tile.num_keys);
  return max(keys.first + 1, last);
}

// First keys of the tiles of `keys` keys that the window does not cut for any of the 64 rows from
// `row` of the tile on.
struct UncutKeys {
  int first;
  int last;
  __device__ __forceinline__ UncutKeys(const QueryTile& tile, const WindowOf<int>& window, int row,
                                       int keys)
      : first(tile.row + row + 63 + window.diagonal - window.before),
        last(min(tile.row + row + window.diagonal + window.after + 1, tile.num_keys) - keys) {}
  __device__ __forceinline__ bool contains(int key) const { return key >= first && key <= last; }
};

__device__ __forceinline__ WindowOf<int> window_of(const AttentionParams& params,
                                                   const QueryTile& tile) {
  return {tile.num_keys - tile.num_queries, window_rows32(params.window_left),
          window_rows32(params.window_right)};
}

// Copies a tile of rows of one head, column block by column block, whose bytes `full` expects; with a
// policy of L2, if there is one.
template <typename Tile, typename... Policy>
__device__ __forceinline__ void copy_expected_tile(Tile& tile, const CUtensorMap& map, int64_t row,
                                                   int head, uint64_t& full, Policy... policy) {
  const int first = static_cast<int>(min(row, int64_t{kMaxRows32}));  // rows past the end are zeros
#pragma unroll
  for (int column = 0; column < Tile::kColumns; column += Tile::kBlockColumns) {
    ptx::cp_async_bulk_tensor_3d(tile.data + column * Tile::kRows, map, column, head, first, full,
                                 policy...);
  }
}

template <typename Tile, typename... Policy>
__device__ __forceinline__ void copy_tile(Tile& tile, const CUtensorMap& map, int64_t row, int head,
                                          uint64_t& full, Policy... policy) {
  ptx::mbarrier_arrive_expect_tx(full, static_cast<int>(sizeof(tile.data)));
  copy_expected_tile(tile, map, row, head, full, policy...);
}

}  // namespace jagged_cuda::attention
