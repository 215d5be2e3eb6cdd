// Where rows of a jagged tensor are, for kernels that take so many rows at a time, of whichever
// sequences: with many short ones that is far less to search than a tile of each.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

namespace jagged_cuda::rows {

// Row `row` of sequence `seq`; seq is -1 outside every sequence.
struct Place {
  int64_t seq;
  int64_t row;
};

// The segment of `row`; all lanes of a warp together.
__device__ __forceinline__ Segment segment_of_row(const OffsetsView& offsets, int64_t row) {
  return find_segment(offsets, [&](int64_t bound, int64_t /*index*/) { return bound <= row; });
}

// Lane i gets the place of row first_row + i. `segment` is one that holds first_row or lies before
// it without rows between; it becomes that of the last row. All lanes of a warp together.
//
// The lanes load the bounds of the next 32 segments, and each counts those at or before its row. Are
// these too few, because many sequences are empty, a search goes on behind all that begin where the
// last of them does: at least one row is gained each time.
__device__ __forceinline__ Place find_places(const OffsetsView& offsets, int64_t first_row,
                                             Segment& segment) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int64_t row = first_row + lane, last_row = first_row + 31;
  int64_t index = segment.index, begin = segment.begin;
  while (true) {
    if (row >= segment.begin) {
      index = segment.index;
      begin = segment.begin;
    }
    const int64_t bound = segment_bound(offsets, segment.index + 1 + lane);
    const int64_t ahead = bound - first_row;
    const int place = ahead < 0 ? 0 : (ahead < 32 ? static_cast<int>(ahead) : 32);
    int passed = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, place, passed + step - 1) <= lane) passed += step;
    }
    if (__shfl_sync(kAllLanes, place, passed) <= lane) ++passed;
    const int64_t passed_bound = __shfl_sync(kAllLanes, bound, passed > 0 ? passed - 1 : 0);
    if (passed > 0) {
      index = segment.index + passed;
      begin = passed_bound;
    }
    const int64_t last = __shfl_sync(kAllLanes, bound, 31);
    if (last > last_row || segment.index + 32 > offsets.num_seqs) break;
    const Segment next = segment_of_row(offsets, last);
    if (next.index <= segment.index) break;  // with wrong offsets alone
    segment = next;
  }
  segment.index = __shfl_sync(kAllLanes, index, 31);
  segment.begin = __shfl_sync(kAllLanes, begin, 31);
  const bool inside = index >= 1 && index <= offsets.num_seqs && begin <= row;
  return {inside ? index - 1 : -1, row - begin};
}

}  // namespace jagged_cuda::rows
