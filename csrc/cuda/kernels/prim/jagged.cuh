// How a kernel finds its part of a jagged tensor, from offsets on the device alone: no lengths on
// the host, no preparation kernel.
//
// With bound[] = 0, offsets[0..B], T there are B + 2 segments: segment 0 holds the rows before all
// sequences, segment s the rows of sequence s - 1, segment B + 1 the rows after all. Segment s owns
// the virtual tiles from
//     start(s) = bound[s] / kTile + s      to      start(s + 1) - 1,
// which are always enough for its rows, so that num_tiles(T, B) = T / kTile + B + 2 tiles cover
// every row exactly once.
//
// Every bound is clamped to [0, T]: wrong offsets give unspecified values, never an access outside
// the tensor.
#pragma once

#include <cstdint>

namespace jagged_cuda {

// offsets [B + 1] of a jagged tensor with `total` rows, int64 if `wide`, else int32.
struct OffsetsView {
  const void* data;
  int64_t num_seqs;
  int64_t total;
  bool wide;
};

// Rows [begin, begin + len) of the whole tensor.
struct RowRange {
  int64_t begin;
  int64_t len;
};

// A tile of kTile rows that starts at row `row` of sequence `seq`, which holds `rows`. Outside all
// sequences seq is -1 and `rows` a segment between them. `row >= rows.len` marks a virtual tile
// without rows.
struct JaggedTile {
  int64_t seq;
  RowRange rows;
  int64_t row;
};

inline int64_t num_tiles(int64_t total, int64_t num_seqs, int tile_rows) {
  return total / tile_rows + num_seqs + 2;
}

#ifdef __CUDACC__

// offsets[index], clamped to [0, total]
__device__ __forceinline__ int64_t clamped_offset(const OffsetsView& offsets, int64_t index) {
  const int64_t value =
      offsets.wide ? __ldg(static_cast<const long long*>(offsets.data) + index)
                   : static_cast<int64_t>(__ldg(static_cast<const int*>(offsets.data) + index));
  return value < 0 ? 0 : (value > offsets.total ? offsets.total : value);
}

__device__ __forceinline__ RowRange sequence_rows(const OffsetsView& offsets, int64_t seq) {
  const int64_t begin = clamped_offset(offsets, seq), end = clamped_offset(offsets, seq + 1);
  return {begin, end > begin ? end - begin : 0};
}

__device__ __forceinline__ int64_t segment_bound(const OffsetsView& offsets, int64_t segment) {
  if (segment <= 0) return 0;
  if (segment > offsets.num_seqs + 1) return offsets.total;
  return clamped_offset(offsets, segment - 1);
}

// The tile with index `tile`, out of num_tiles(). All 32 lanes of a warp must call it together:
// each step of the search probes 32 places at once, so that 1,024 sequences take two dependent
// loads and a million four. Its row is never negative, whatever the offsets.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile(const OffsetsView& offsets, int64_t tile) {
  const int lane = threadIdx.x % 32;
  // start(low) <= tile < start(high); begin and end are their bounds.
  int64_t low = 0, high = offsets.num_seqs + 2, begin = 0, end = offsets.total;
  while (high - low > 1) {
    const int64_t step = (high - low + 32) / 33;
    const int64_t probe = low + step * (lane + 1);
    const int64_t bound = segment_bound(offsets, probe < high ? probe : high);
    const bool before = probe < high && bound / kTile + probe <= tile;
    // The lanes before the first that has not passed: with wrong offsets others may follow, and
    // start(low) must still not lie behind the tile.
    const unsigned stopped = ~__ballot_sync(0xffffffffu, before);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    const int64_t first = __shfl_sync(0xffffffffu, bound, passed > 0 ? passed - 1 : 0),
                  last = __shfl_sync(0xffffffffu, bound, passed < 32 ? passed : 31);
    low += step * passed;
    if (passed > 0) begin = first;
    if (low + step < high) {
      high = low + step;
      end = last;
    }
  }
  const bool inside = low >= 1 && low <= offsets.num_seqs;
  return {inside ? low - 1 : -1,
          {begin, end > begin ? end - begin : 0},
          (tile - (begin / kTile + low)) * kTile};
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
