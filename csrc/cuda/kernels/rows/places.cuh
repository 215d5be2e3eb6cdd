// Where rows of a jagged tensor are, for kernels that take so many rows at a time, of whichever
// sequences: with many short ones that is far less to search than a tile of each.
//
// Offsets are any type with num_seqs, total and a segment_bound (prim/jagged.cuh), whose segments
// these are.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

namespace jagged_cuda::rows {

// Row `row` of sequence `seq`; seq is -1 outside every sequence.
struct Place {
  int64_t seq;
  int64_t row;
};

// The segment of `row`; all lanes of a warp together, which probe 32 places at once. With many
// sequences the first probes lie around the place where it is if all have the same length: for
// 200,000 of random lengths two dependent loads instead of four. Whatever the offsets, the segment
// begins at or before the row.
template <typename Offsets>
__device__ __forceinline__ Segment segment_of_row(const Offsets& offsets, int64_t row) {
  constexpr int64_t kManySeqs = 2048, kHintStep = 32;
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  // low begins at or before the row, high behind it; begin and end are their bounds.
  int64_t low = 0, high = offsets.num_seqs + 2, begin = 0, end = offsets.total;
  bool is_hint = offsets.num_seqs >= kManySeqs;
  while (high - low > 1) {
    int64_t step = (high - low + 32) / 33, first = low + step;
    if (is_hint) {
      const float share = static_cast<float>(row) / static_cast<float>(offsets.total);
      step = kHintStep;
      first = static_cast<int64_t>(share * static_cast<float>(offsets.num_seqs)) - 16 * step;
      is_hint = false;
    }
    const int64_t wanted = first + step * lane;
    const int64_t probe = wanted < low ? low : wanted < high ? wanted : high;
    const int64_t bound = segment_bound(offsets, probe);
    // The lanes before the first that has not passed: with wrong offsets others may follow.
    const unsigned stopped =
        ~__ballot_sync(kAllLanes, probe == low || (probe < high && bound <= row));
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    if (passed > 0) {
      low = __shfl_sync(kAllLanes, probe, passed - 1);
      begin = __shfl_sync(kAllLanes, bound, passed - 1);
    }
    if (passed < 32) {
      high = __shfl_sync(kAllLanes, probe, passed);
      end = __shfl_sync(kAllLanes, bound, passed);
    }
  }
  return {low, begin, end};
}

// Lane i gets the places of rows first_row + kEach i to first_row + kEach (i + 1) - 1. All lanes of a
// warp together.
//
// Behind the segment of the first row the lanes load the bounds of the next 32, and each counts those at
// or before its rows. Are these too few, because many sequences are short, a search goes on behind all
// that begin where the last of them does: at least one row is gained each time.
template <int kEach, typename Offsets>
__device__ __forceinline__ void find_places(const Offsets& offsets, int64_t first_row,
                                            Place (&places)[kEach]) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kSpan = 32 * kEach;
  const int lane = threadIdx.x % 32;
  int64_t index[kEach] = {}, begin[kEach] = {};  // wrong offsets may leave some out
  int64_t wanted = first_row, before = -1;
#pragma unroll 1
  while (true) {
    const Segment segment = segment_of_row(offsets, wanted);
    if (segment.index <= before) break;  // with wrong offsets alone
    before = segment.index;
    const int64_t bound = segment_bound(offsets, segment.index + 1 + lane);
    const int64_t ahead = bound - first_row;
    const int place = ahead < 0 ? 0 : (ahead < kSpan ? static_cast<int>(ahead) : kSpan);
    const int64_t behind = segment.begin - first_row;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int row = kEach * lane + e;
      int passed = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(kAllLanes, place, passed + step - 1) <= row) passed += step;
      }
      if (__shfl_sync(kAllLanes, place, passed) <= row) ++passed;
      const int passed_place = __shfl_sync(kAllLanes, place, passed > 0 ? passed - 1 : 0);
      if (passed > 0) {
        index[e] = segment.index + passed;
        begin[e] = first_row + passed_place;
      } else if (row >= behind) {  // else its segment was among those before
        index[e] = segment.index;
        begin[e] = segment.begin;
      }
    }
    wanted = __shfl_sync(kAllLanes, bound, 31);
    if (wanted >= first_row + kSpan || segment.index + 32 > offsets.num_seqs) break;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t row = first_row + kEach * lane + e;
    const bool inside = index[e] >= 1 && index[e] <= offsets.num_seqs && begin[e] <= row;
    places[e] = {inside ? index[e] - 1 : -1, row - begin[e]};
  }
}

}  // namespace jagged_cuda::rows
