// The kernels of jagged_target_attention, as host code sees them.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// A [B, N, H, dim] operand whose last dimension is contiguous; strides in elements.
struct QueriesView {
  const void* data;
  int64_t seq_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// Keys of a sequence are cut into chunks of 2^target_chunk_log2 keys; a sequence of more is computed in
// parts, which are merged in order. Short chunks end together; where there are few rows their parts are
// still small beside the keys. All that counts is `rows`, the rows of a key/value head: a sequence's bits do
// not depend on its neighbours.
constexpr int target_chunk_log2(int64_t rows) {
  constexpr int64_t kFewRows = 4;
  return rows <= kFewRows ? 8 : 9;
}

// Rows of a key/value head from which on kernels on wgmma may serve, which are persistent.
constexpr int64_t kPersistentTargetRows = 20;

// A sequence of more than one chunk owns a slot of the workspace for each, counted from
// 2 begin / chunk on, where begin is its first row, or, if that makes fewer slots, as virtual tiles
// are counted (prim/jagged.cuh). The slots of two such sequences never overlap, and all lie below
// `count`, whatever the offsets.
struct TargetSlots {
  bool as_tiles;
  int64_t count;
};

inline TargetSlots target_slots(int64_t total, int64_t num_seqs, int chunk_log2) {
  const int64_t by_rows = ((2 * total) >> chunk_log2) + 1;
  const int64_t as_tiles = num_tiles(total, num_seqs, 1 << chunk_log2);
  return {as_tiles < by_rows, as_tiles < by_rows ? as_tiles : by_rows};
}

// 16-bit elements. Of one key/value head of one sequence, row r is query r / group of head
// r % group of the group; there are N * group rows.
struct TargetAttentionParams {
  ElementType type;     // kBf16 or kF16
  OffsetsView offsets;  // [B + 1], rows of k and v
  QueriesView q;        // [B, N, H, D]
  HeadsView k;          // [T, G, D]
  HeadsView v;          // [T, G, Dv]
  void* out;            // [B, N, H, Dv] contiguous: written forward, read backward
  float* lse;           // [B, N, H] contiguous: written forward, read backward
  // Workspace: forward the weighted sums of values of each part, backward its part of dq. Null if
  // no sequence has more than one chunk, as far as the host knows. 16-byte aligned.
  float* parts;         // [slots, G, rows, dim_v (backward dim_qk) rounded up to 8], may be null
  float* part_stats;    // [slots, G, rows, 2]: maximum and sum; null backward and with parts
  bool slots_as_tiles;  // TargetSlots
  int slot_log2;        // of slots: target_chunk_log2()
  int chunk_log2;       // of chunks: that, or more, and then some slots stay empty
  // Items of a persistent kernel that were taken beside the first of each CTA: workspace that its launch clears
  // (attention/target_items.cuh). Null for fewer rows than kPersistentTargetRows: then no such kernel serves.
  unsigned long long* next_item;
  int out_queries;  // N of out and lse
  int num_queries;  // that this launch computes: the first of q, out and lse
  int heads;        // H
  int kv_heads;     // G, divides H
  int dim_qk;       // D
  int dim_v;        // Dv
  float scale;
  // True if rows of q, k, v (and of the gradients) start at 16-byte boundaries and D and Dv are
  // multiples of 8.
  bool aligned;
  bool mma_sync_only;  // JAGGED_CUDA_TENSOR_CORES=mma_sync
};

struct TargetAttentionBackwardParams : TargetAttentionParams {
  QueriesView grad_out;   // [B, N, H, Dv]
  const float* grad_lse;  // [B, N, H] contiguous, may be null
  void* grad_q;           // [B, N, H, D] contiguous
  void* grad_k;           // [T, G, D] contiguous
  void* grad_v;           // [T, G, Dv] contiguous
};

// Rows that the backward kernel holds at a time; with more, the kernels of jagged_flash_attention
// serve.
inline int64_t target_backward_rows(int64_t dim_qk, int64_t dim_v) {
  return dim_qk > 128 || dim_v > 128 ? 64 : 128;
}

cudaError_t launch_jagged_target_attention(const TargetAttentionParams& params,
                                           cudaStream_t stream);
cudaError_t launch_jagged_target_attention_backward(const TargetAttentionBackwardParams& params,
                                                    cudaStream_t stream);

// Fills offsets [B + 1] with 0, N, 2 N, ...: dense queries as a jagged tensor.
cudaError_t launch_query_offsets(int64_t* offsets, int64_t num_seqs, int64_t num_queries,
                                 cudaStream_t stream);

}  // namespace jagged_cuda
