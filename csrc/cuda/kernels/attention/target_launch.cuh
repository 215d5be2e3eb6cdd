// Launching the kernels of jagged_target_attention for sizes known at run time.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/target_launch.h"
#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

// Calls launch(Constant<head dim>) for the smallest compiled head dim that holds D and Dv.
template <typename Launch>
cudaError_t for_target_dim(const TargetAttentionParams& params, Launch launch) {
  switch (target_dim_bucket(params)) {
    case 32:
      return launch(Constant<32>{});
    case 64:
      return launch(Constant<64>{});
    case 128:
      return launch(Constant<128>{});
    case 256:
      return launch(Constant<256>{});
  }
  return cudaErrorInvalidValue;
}

constexpr int64_t kMaxGrid = 0x7fffffff;

// Chunks, times key/value heads, times row tiles of each.
inline cudaError_t target_grid(const TargetAttentionParams& params, int64_t row_tiles, dim3* grid) {
  const int64_t chunks = num_tiles(params.offsets.total, params.offsets.num_seqs, kTargetChunk);
  const int64_t tiles = row_tiles * params.kv_heads;
  if (tiles > kMaxGrid / chunks) return cudaErrorInvalidConfiguration;
  *grid = dim3(static_cast<unsigned>(chunks * tiles));
  return cudaSuccess;
}

// Merges the parts of long sequences, if there may be any.
template <auto kKernel, typename Params>
cudaError_t launch_merge(const Params& params, int columns, cudaStream_t stream) {
  if (params.parts == nullptr) return cudaSuccess;
  const int64_t ctas = params.offsets.num_seqs * merge_pieces(params, columns);
  if (ctas > kMaxGrid) return cudaErrorInvalidConfiguration;
  return launch_dependent<kKernel>(params, dim3(static_cast<unsigned>(ctas)), kMergeThreads, 0,
                                   stream);
}

}  // namespace jagged_cuda::attention
