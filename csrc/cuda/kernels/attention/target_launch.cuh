// Launching the kernels of jagged_target_attention for sizes known at run time.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/target_launch.h"
#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

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
