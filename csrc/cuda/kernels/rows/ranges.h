// What jagged_slice and jagged_index_select ask of the kernels that they share (rows/ranges.cuh).
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

constexpr int kRangeTile = 1024;  // ranges of a CTA

// Range i is rows first to first + len of sequence chosen[i], where first = begin[i] + skip and
// len = min(length[i], most), both cut to what the sequence has. No pointer may be null unless it
// says so.
struct RangesParams {
  OffsetsView offsets;    // [B + 1] of the source, and its rows
  const int64_t* chosen;  // [num_ranges], or null: range i is of sequence i
  const void* begin;      // [num_ranges], like offsets, or null: 0
  const void* length;     // [num_ranges], like offsets, or null: all
  int64_t num_ranges;
  int64_t skip;
  int64_t most;
  bool from_end;       // first counts from the sequence's end
  int64_t* tile_sums;  // [range_tiles(num_ranges)], or null for one tile
  void* planned;       // [num_ranges + 1], like offsets
  int64_t* uncut;      // [num_ranges + 1], or null: what planned is before it is cut
  int64_t* index;      // [total]; null if total is 0
  int64_t total;
  int64_t capacity;  // at most total
};

// Of num_ranges + 1 offsets.
inline int64_t range_tiles(int64_t num_ranges) { return num_ranges / kRangeTile + 1; }

}  // namespace jagged_cuda
