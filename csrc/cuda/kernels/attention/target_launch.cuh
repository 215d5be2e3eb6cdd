// Launching the kernels of jagged_target_attention for sizes known at run time.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

inline int64_t target_rows(const TargetAttentionParams& params) {
  return int64_t{params.num_queries} * (params.heads / params.kv_heads);
}

// Rows of a tile, by the rows of a key/value head; 256 dims have 64 in place of 128.
inline int target_forward_rows(const TargetAttentionParams& params) {
  const int64_t rows = target_rows(params);
  return rows <= 16 ? 16 : (rows <= 32 ? 32 : 128);
}
inline int target_backward_tile(const TargetAttentionParams& params) {
  return target_rows(params) <= 32 ? 32 : 128;
}

// Chunks, times key/value heads, times row tiles of each.
inline Grid target_grid(const TargetAttentionParams& params, int64_t row_tiles) {
  const int64_t chunks = num_tiles(params.offsets.total, params.offsets.num_seqs, kTargetChunk);
  const int64_t tiles = row_tiles * params.kv_heads;
  return {tiles > Grid::kMaxX / chunks ? Grid::kMaxX + 1 : chunks * tiles};
}

// Merges the parts of long sequences, if there may be any.
template <auto kKernel, typename Params>
cudaError_t launch_merge(const Params& params, int columns, cudaStream_t stream) {
  if (params.parts == nullptr) return cudaSuccess;
  const int64_t ctas = params.offsets.num_seqs * merge_pieces(params, columns);
  return launch_dependent<kKernel>(params, {ctas}, kMergeThreads, 0, stream);
}

}  // namespace jagged_cuda::attention
