// The workspace that attention/time_tiles.cuh describes, as host code sees it.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda {

constexpr int kTimeSpanRows = 16, kTimeSpanBytes = 16;
constexpr int kTimeCells = 256, kTimeTableBytes = kTimeCells * 16 + 16;

// Behind tile_bounds_bytes(): nothing without time_bias.
inline int64_t time_tiles_bytes(const AttentionParams& params) {
  if (params.bias.time_table == nullptr) return 0;
  const OffsetsView &q = params.q_offsets, &kv = params.kv_offsets;
  return int64_t{params.bias.time_heads} * kTimeTableBytes +
         (num_tiles(q.total, q.num_seqs, kTimeSpanRows) +
          num_tiles(kv.total, kv.num_seqs, kTimeSpanRows)) *
             kTimeSpanBytes;
}

}  // namespace jagged_cuda
