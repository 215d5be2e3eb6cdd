// find_tile of prim/jagged.cuh in 32-bit arithmetic, for tensors of fewer than 2^30 rows and grids of
// fewer than 2^31 tiles.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cstdint>

namespace jagged_cuda {

#ifdef __CUDACC__

// The tile with index `tile`, out of num_tiles(), of 2^rows_log2 rows; all 32 lanes of a warp together.
// The first step looks at 32 segments that follow each other, where the tile's would lie if all were
// alike: as a rule it is among them.
__device__ __forceinline__ JaggedTile find_tile_narrow(const OffsetsView& offsets, uint32_t tile,
                                                       int rows_log2) {
  const uint32_t lane = threadIdx.x % 32, total = static_cast<uint32_t>(offsets.total),
                 segments = static_cast<uint32_t>(offsets.num_seqs) + 2;
  // The first row of segment `index`, which lies within (0, segments).
  const auto bound_of = [&](uint32_t index) -> uint32_t {
    return static_cast<uint32_t>(clamped_offset(offsets, index - 1));
  };
  // The first tile of `low` is not behind `tile`, that of `high` is; begin and end are their bounds.
  uint32_t low = 0, high = segments, begin = 0, end = total;
  const float share =
      __fdividef(static_cast<float>(tile), static_cast<float>((total >> rows_log2) + segments));
  const uint32_t likely =
      min(static_cast<uint32_t>(share * static_cast<float>(segments)), segments);
  uint32_t base = likely <= 16 ? 0 : likely - 16, step = 1;
#pragma unroll 1
  do {
    const uint32_t probe = base + step * (lane + 1);
    const bool exists = probe < high;
    const uint32_t bound = exists ? bound_of(probe) : total;
    // The lanes before the first that has not passed: with wrong offsets others may follow.
    const unsigned stopped =
        ~__ballot_sync(0xffffffffu, exists && (bound >> rows_log2) + probe <= tile);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    const uint32_t first = __shfl_sync(0xffffffffu, bound, passed - 1),
                   last = __shfl_sync(0xffffffffu, bound, passed);
    const uint32_t next = base + step * (passed + 1);
    if (passed > 0) {
      low = base + step * passed;
      begin = first;
    }
    if (passed < 32 && next < high) {
      high = next;
      end = last;
    }
    base = low;
    step = (high - low + 32) / 33;
  } while (high - low > 1);
  const bool inside = low >= 1 && low + 1 < segments;
  const uint32_t len = end > begin ? end - begin : 0;
  return {inside ? static_cast<int64_t>(low) - 1 : -1,
          {static_cast<int64_t>(begin), static_cast<int64_t>(len)},
          static_cast<int64_t>((tile - ((begin >> rows_log2) + low)) << rows_log2)};
}

template <int kTile>
__device__ __forceinline__ JaggedTile find_tile_narrow(const OffsetsView& offsets, uint32_t tile) {
  static_assert((kTile & (kTile - 1)) == 0);
  return find_tile_narrow(offsets, tile, 31 - __builtin_clz(kTile));
}

// The same of any tensor.
template <int kTile>
__device__ __forceinline__ JaggedTile find_any_tile(const OffsetsView& offsets, int64_t tile) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return offsets.total < kMost && offsets.num_seqs < kMost
             ? find_tile_narrow<kTile>(offsets, static_cast<uint32_t>(tile))
             : find_tile<kTile>(offsets, tile);
}

// Likewise of 2^rows_log2 rows.
__device__ __forceinline__ JaggedTile find_any_tile(const OffsetsView& offsets, int64_t tile,
                                                    int rows_log2) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (offsets.total < kMost && offsets.num_seqs < kMost)
    return find_tile_narrow(offsets, static_cast<uint32_t>(tile), rows_log2);
  const Segment segment = find_segment(
      offsets, [&](int64_t bound, int64_t index) { return (bound >> rows_log2) + index <= tile; });
  return tile_of(offsets, segment,
                 (tile - ((segment.begin >> rows_log2) + segment.index)) << rows_log2);
}

// The sequence that holds a row, for warps that take rows first and ask for their sequences then.
// Segments are those of prim/jagged.cuh: segment s holds the rows of sequence s - 1, the first and the
// last one those outside all sequences. All 32 lanes of a warp together.
class RowOwner {
 public:
  __device__ __forceinline__ RowOwner(const OffsetsView& offsets, uint32_t row)
      : offsets_(offsets) {
    search(row);
  }

  // Moves on to the owner of `row`, which lies behind the one before.
  __device__ __forceinline__ void advance(uint32_t row) {
    const uint32_t probe = segment_ + 1 + threadIdx.x % 32;
    const uint32_t bound = bound_of(probe);
    const unsigned stopped = ~__ballot_sync(0xffffffffu, probe < segments() && bound <= row);
    if (stopped == 0) return search(row);
    const int passed = __ffs(static_cast<int>(stopped)) - 1;
    segment_ += passed;
    end_ = __shfl_sync(0xffffffffu, bound, passed);
  }

  __device__ __forceinline__ bool is_sequence() const {
    return segment_ >= 1 && segment_ + 1 < segments();
  }
  __device__ __forceinline__ uint32_t seq() const { return segment_ - 1; }
  // The row behind its last one. With wrong offsets it may lie anywhere.
  __device__ __forceinline__ uint32_t end() const { return end_; }

 private:
  __device__ __forceinline__ uint32_t segments() const {
    return static_cast<uint32_t>(offsets_.num_seqs) + 2;
  }
  // The first row of segment `index`, which is not 0; behind the last one there are no rows.
  __device__ __forceinline__ uint32_t bound_of(uint32_t index) const {
    return index < segments() ? static_cast<uint32_t>(clamped_offset(offsets_, index - 1))
                              : static_cast<uint32_t>(offsets_.total);
  }
  __device__ __forceinline__ void search(uint32_t row) {
    // The first row of `low` is not behind `row`, that of `high`, `end_`, is.
    uint32_t low = 0, high = segments();
    end_ = static_cast<uint32_t>(offsets_.total);
    while (high - low > 1) {
      const uint32_t step = (high - low + 32) / 33, probe = low + step * (threadIdx.x % 32 + 1);
      const bool exists = probe < high;
      const uint32_t bound = exists ? bound_of(probe) : 0;
      const unsigned stopped = ~__ballot_sync(0xffffffffu, exists && bound <= row);
      const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
      const uint32_t last = __shfl_sync(0xffffffffu, bound, passed);
      low += step * passed;
      if (low + step < high) {
        high = low + step;
        end_ = last;
      }
    }
    segment_ = low;
  }

  const OffsetsView& offsets_;
  uint32_t segment_, end_;
};

#endif  // __CUDACC__

}  // namespace jagged_cuda
