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

constexpr int64_t num_longer_tiles(int64_t total, int slab_rows) {
  return (total + slab_rows - 1) / slab_rows * 2;
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

// Segment `index`, rows [begin, end); wrong offsets may put its end before its begin.
struct Segment {
  int64_t index;
  int64_t begin;
  int64_t end;
};

// The last segment for which before(its first row, its index), which must hold for segment 0 and
// for none behind one for which it does not. All 32 lanes of a warp must call it together: each
// step of the search probes 32 places at once, so that 1,024 sequences take two dependent loads and
// a million four. Whatever the offsets, `before` holds for what it finds.
template <typename Before>
__device__ __forceinline__ Segment find_segment(const OffsetsView& offsets, Before before) {
  const int lane = threadIdx.x % 32;
  // before(low) and not before(high); begin and end are their bounds.
  int64_t low = 0, high = offsets.num_seqs + 2, begin = 0, end = offsets.total;
  while (high - low > 1) {
    const int64_t step = (high - low + 32) / 33;
    const int64_t probe = low + step * (lane + 1);
    const int64_t bound = segment_bound(offsets, probe < high ? probe : high);
    // The lanes before the first that has not passed: with wrong offsets others may follow.
    const unsigned stopped = ~__ballot_sync(0xffffffffu, probe < high && before(bound, probe));
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
  return {low, begin, end};
}

__device__ __forceinline__ JaggedTile tile_of(const OffsetsView& offsets, const Segment& segment,
                                              int64_t row) {
  const bool inside = segment.index >= 1 && segment.index <= offsets.num_seqs;
  return {inside ? segment.index - 1 : -1,
          {segment.begin, segment.end > segment.begin ? segment.end - segment.begin : 0},
          row};
}

// The tile with index `tile`, out of num_tiles(); all 32 lanes of a warp together. Its row is never
// negative, whatever the offsets.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile(const OffsetsView& offsets, int64_t tile) {
  const Segment segment = find_segment(
      offsets, [&](int64_t bound, int64_t index) { return bound / kTile + index <= tile; });
  return tile_of(offsets, segment, (tile - (segment.begin / kTile + segment.index)) * kTile);
}

// Of the tiles in a slab of rows that `segment` may own: its tile that starts there, where it begins
// before the slab's first row (`first_of_slab`) or behind it.
template <int kTile>
__device__ __forceinline__ JaggedTile longer_tile_of(const OffsetsView& offsets,
                                                     const Segment& segment, int64_t slab,
                                                     int slab_rows, bool first_of_slab) {
  const int64_t before = slab - segment.begin;
  const int64_t first = before > 0 ? (before + kTile - 1) / kTile * kTile : 0;
  const bool starts_here = first_of_slab ? first - before < slab_rows : before < 0;
  return tile_of(offsets, segment, starts_here ? first : segment.end);
}

// The tile with index `tile`, out of num_longer_tiles(), of sequences of more than slab_rows, at most
// kTile; the others, and rows outside, may have some, too. In slab_rows at most two such sequences have
// a tile that starts there: the one that holds the first of these rows, and one that begins behind it
// and then holds the last.
//
// All 32 lanes of a warp together.
template <int kTile>
__device__ __forceinline__ JaggedTile find_longer_tile(const OffsetsView& offsets, int slab_rows,
                                                       int64_t tile) {
  const int64_t slab = tile / 2 * slab_rows, last = offsets.total - 1,
                row = slab + tile % 2 * (slab_rows - 1);
  const Segment segment = find_segment(offsets, [&](int64_t bound, int64_t /*index*/) {
    return bound <= (row < last ? row : last);
  });
  return longer_tile_of<kTile>(offsets, segment, slab, slab_rows, tile % 2 == 0);
}

// find_longer_tile(), or find_tile() where slab_rows is 0, by one search in the code.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile_or_longer(const OffsetsView& offsets, int slab_rows,
                                                          int64_t tile) {
  const bool longer = slab_rows > 0;
  const int64_t slab = tile / 2 * slab_rows, last = offsets.total - 1,
                row = min(slab + tile % 2 * (slab_rows - 1), last);
  const Segment segment = find_segment(offsets, [&](int64_t bound, int64_t index) {
    return (longer ? bound : bound / kTile + index) <= (longer ? row : tile);
  });
  if (longer) return longer_tile_of<kTile>(offsets, segment, slab, slab_rows, tile % 2 == 0);
  return tile_of(offsets, segment, (tile - (segment.begin / kTile + segment.index)) * kTile);
}

// The same as find_longer_tile(), of another tile in each lane.
template <int kTile>
__device__ __forceinline__ JaggedTile find_longer_tile_of_lane(const OffsetsView& offsets,
                                                               int slab_rows, int64_t tile) {
  const int64_t slab = tile / 2 * slab_rows, last = offsets.total - 1,
                row = slab + tile % 2 * (slab_rows - 1);
  int64_t low = 0, high = offsets.num_seqs + 2, begin = 0, end = offsets.total;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2, bound = segment_bound(offsets, middle);
    if (bound <= (row < last ? row : last)) {
      low = middle;
      begin = bound;
    } else {
      high = middle;
      end = bound;
    }
  }
  return longer_tile_of<kTile>(offsets, {low, begin, end}, slab, slab_rows, tile % 2 == 0);
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
