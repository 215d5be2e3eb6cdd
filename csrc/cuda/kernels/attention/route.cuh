// Which kernel takes a sequence, by its own length alone, so that its bits do not depend on its
// neighbours.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/jagged.cuh"

namespace jagged_cuda::attention {

__device__ __forceinline__ bool is_tiny(int64_t queries, int64_t keys) {
  return queries <= kTinyRows && keys <= kTinyRows;
}

// Whether another kernel leaves a sequence to those for tiny ones, as it leaves to them the rows
// outside all sequences where params.split_by_length.
__device__ __forceinline__ bool left_to_tiny(const AttentionParams& params, int64_t queries,
                                             int64_t keys) {
  return params.split_by_length && is_tiny(queries, keys);
}

// Whether another kernel leaves a sequence to that for short ones.
__device__ __forceinline__ bool left_to_short(const AttentionParams& params, int64_t queries,
                                              int64_t keys) {
  return params.short_apart && queries <= kShortRows && keys <= kShortRows;
}

// Whether another kernel leaves a sequence to that for long ones.
template <typename Params>
__device__ __forceinline__ bool left_to_long(const Params& params, int64_t queries) {
  return params.long_plan != nullptr && queries > long_rows(params);
}

// This CTA's tile in a grid of tile_grid(). There may be none: row >= rows.len.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile_of(const AttentionParams& params,
                                                   const OffsetsView& offsets) {
  if (params.longer_in_slabs) return find_longer_tile<kTile, kTinyRows>(offsets, blockIdx.x);
  return find_tile<kTile>(offsets, blockIdx.x);
}

}  // namespace jagged_cuda::attention
