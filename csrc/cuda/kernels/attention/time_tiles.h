// The workspace that attention/time_tiles.cuh describes, as host code sees it.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda {

constexpr int kTimeSpanRows = 16, kTimeSpanBytes = 16;
constexpr int kTimeCells = 256, kTimeTableBytes = kTimeCells * 16 + 16;

// Behind tile_bounds_bytes(): nothing without position_bias.
constexpr int kPositionMargin = 128;
constexpr int position_line(int buckets) { return (buckets + 2 * kPositionMargin + 2) / 2 * 2; }
constexpr int64_t position_tiles_bytes(const ScoreBias& bias) {
  return bias.position_table == nullptr
             ? 0
             : int64_t{bias.position_heads} * 2 * position_line(bias.position_buckets) * 4;
}

// Behind these: nothing without time_bias.
inline int64_t time_tiles_bytes(const AttentionParams& params) {
  if (params.bias.time_table == nullptr) return 0;
  const OffsetsView &q = params.q_offsets, &kv = params.kv_offsets;
  return int64_t{params.bias.time_heads} * kTimeTableBytes +
         (num_tiles(q.total, q.num_seqs, kTimeSpanRows) +
          num_tiles(kv.total, kv.num_seqs, kTimeSpanRows)) *
             kTimeSpanBytes +
         (q.total + kv.total) * 4;
}

}  // namespace jagged_cuda
