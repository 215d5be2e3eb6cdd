// jagged_index_select on CUDA: the plan that takes whole sequences by their numbers.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/rows/ranges.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues up to three kernels that write index and offsets. No synchronisation.
cudaError_t launch_jagged_index_select_plan(const RangesParams& params, cudaStream_t stream);

// Rows [begin, begin + len) of a copy.
struct alignas(16) CopyRows {
  int64_t begin;
  int64_t len;
};

constexpr int64_t kMostCounted = 4096;  // copies and sequences that can be grouped without order

// Grouping and planning the copies. No pointer may be null unless it says so.
struct GroupCopiesParams {
  OffsetsView source;     // [B + 1] of the sequences
  const int64_t* chosen;  // [M]: the number of the sequence that each one is
  void* planned;          // [M + 1] like source: the offsets of the copies
  int64_t* uncut;         // [M + 1], or null: what planned is before it is cut
  int64_t capacity;       // rows of all copies
  CopyRows* copies;       // [M]: their rows, those of the first sequence first
  CopyRows* firsts;       // [B]: the first of each sequence, where it has any
  int64_t* groups;        // [B + 1]: where in copies those of each sequence begin
  int64_t num_copies;
  int64_t num_seqs;
};

// Enqueues one kernel that writes copies, firsts, groups and planned. No synchronisation. It takes time
// M (M + B).
cudaError_t launch_group_copies(const GroupCopiesParams& params, cudaStream_t stream);

// Where a sort has grouped the copies. No pointer may be null.
struct FollowOrderParams {
  OffsetsView taken;      // [M + 1] of the copies
  const int64_t* chosen;  // [M]: the number of the sequence that each one is
  const int64_t* order;   // [M]: the copies of the first sequence, then those of the next
  const int64_t* groups;  // [B + 1]: where in order those of each sequence begin
  CopyRows* copies;       // [M]: their rows, in that order
  CopyRows* firsts;       // [B]: the first of each sequence, where it has any
  int64_t num_copies;
  int64_t num_seqs;
};

// Enqueues one kernel that writes copies and firsts. No synchronisation.
cudaError_t launch_follow_order(const FollowOrderParams& params, cudaStream_t stream);

// A tile of rows of x, and where its gradient comes from.
struct alignas(16) FoundTile {
  int64_t begin;         // its first row in the whole tensor
  int64_t source;        // where the first copy has that row
  int64_t row;           // in its sequence
  uint16_t rows;         // none: a virtual tile
  uint16_t source_rows;  // of these, that the first copy has
  uint16_t group;        // where in copies those of its sequence begin
  uint16_t copies;       // how many they are
};

// No pointer may be null.
struct FindTilesParams {
  OffsetsView taken;      // [M + 1] of the copies
  OffsetsView source;     // [B + 1] of the sequences
  const int64_t* chosen;  // [M]: the number of the sequence that each one is
  CopyRows* copies;       // [M]: their rows, those of the first sequence first
  FoundTile* tiles;       // [num_tiles]
  int64_t num_copies;
  int64_t num_seqs;
  int64_t num_tiles;
  int tile_log2;  // of its rows
};

// Enqueues one kernel that writes tiles and copies. No synchronisation. It takes time M B.
cudaError_t launch_find_tiles(const FindTilesParams& params, cudaStream_t stream);

// How many rows a tile of rows of so many bytes has, as a power of 2.
int found_tile_log2(int64_t row_bytes);

// No pointer may be null, except for tensors without elements.
struct WriteCopiesParams {
  const void* x;           // [T, row_units] in units
  void* out;               // [N, row_units], contiguous
  OffsetsView offsets;     // [B + 1] of x
  OffsetsView taken;       // [M + 1] of out
  const CopyRows* copies;  // [M]: the copies of the first sequence, then those of the next
  const CopyRows* firsts;  // [B]: the first of each sequence, where it has any
  const int64_t* groups;   // [B + 1]: where in copies those of each sequence begin
  int64_t num_copies;
  int64_t row_units;
  int64_t stride;  // units between rows of x
  int unit_bytes;  // 1, 2, 4, 8 or 16
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_index_select(const WriteCopiesParams& params, cudaStream_t stream);

// Either tiles, or firsts and groups are null. No other pointer may be, except for tensors without
// elements.
struct SumCopiesParams {
  const void* grad_out;    // [N, columns]
  void* out;               // [T, columns], contiguous
  OffsetsView offsets;     // [B + 1] of out
  const CopyRows* copies;  // [M]: the copies of the first sequence, then those of the next
  const CopyRows* firsts;  // [B]: the first of each sequence, where it has any
  const int64_t* groups;   // [B + 1]: where in copies those of each sequence begin
  const FoundTile* tiles;  // [num_tiles]
  int64_t num_tiles;
  int64_t num_copies;
  int64_t num_rows;  // N
  int64_t columns;
  int64_t stride;  // elements between rows of grad_out
  bool vectors;    // rows are whole vectors of 16 bytes, aligned
  ElementType type;
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_index_select_backward(const SumCopiesParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
