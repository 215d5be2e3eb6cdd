// The virtual tiles of prim/jagged.cuh, another one in each lane: for a warp that takes many of
// them. 32 together take little longer than one that a warp searches for (prim/narrow_search.cuh),
// most of which is waiting. In 32-bit arithmetic, for tensors of fewer than 2^30 rows and grids of
// fewer than 2^31 tiles.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cstdint>

namespace jagged_cuda {

#ifdef __CUDACC__

// The tile with index `tile`, out of num_tiles(), of this lane alone. Its row is never negative,
// whatever the offsets.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile_of_lane(const OffsetsView& offsets, uint32_t tile) {
  constexpr int kProbes = 3;  // at once, since a step takes as long as a load
  const uint32_t segments = static_cast<uint32_t>(offsets.num_seqs) + 2;
  // The first tile of `low` is not behind `tile`, that of `high` is; begin and end are their bounds.
  uint32_t low = 0, high = segments, begin = 0, end = static_cast<uint32_t>(offsets.total);
  while (high - low > 1) {
    const uint32_t first = low, last = high, step = (high - low + kProbes) / (kProbes + 1);
    uint32_t bounds[kProbes];
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      const uint32_t probe = first + (i + 1) * step;
      // Past the last one any will do.
      bounds[i] = static_cast<uint32_t>(
          clamped_offset(offsets, static_cast<int64_t>(probe < last ? probe : last - 1) - 1));
    }
    // Those before the first that has not passed: with wrong offsets others may follow.
    bool passed = true;
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      const uint32_t probe = first + (i + 1) * step;
      if (!passed || probe >= last) break;
      passed = bounds[i] / kTile + probe <= tile;
      (passed ? low : high) = probe;
      (passed ? begin : end) = bounds[i];
    }
  }
  const bool inside = low >= 1 && low + 1 < segments;
  const uint32_t len = end > begin ? end - begin : 0;
  return {inside ? static_cast<int64_t>(low) - 1 : -1,
          {static_cast<int64_t>(begin), static_cast<int64_t>(len)},
          static_cast<int64_t>((tile - (begin / kTile + low)) * kTile)};
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
