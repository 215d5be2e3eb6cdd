// Sums over the rows of a sequence, shared out: what products that give one matrix per sequence have
// in common.
//
// A sequence of more than `rows_each` rows is cut into parts of as many, the last of fewer, from its
// first row on. So where it is cut, and with that every bit of its result, follows from its own
// length. A part of such a sequence leaves its sums, f32, in a slot of `partial`; another kernel adds
// a sequence's slots in order (gemm/add_row_parts.cuh).
//
// Units: first one for each slab of rows_each rows of the whole tensor, then one for each sequence.
// The unit of a sequence is its first part. That of slab j is the later part that begins there; there
// is at most one, of the sequence that holds the slab's first row. Long sequences, which would end
// last, so begin first, and only their units search.
//
// Slots: two for each slab. The later part that begins in slab j has slot 2 j + 1, and the first part
// of a sequence whose second one begins in slab j has slot 2 j, so that no two parts share one.
//
// Without sequences that long (T <= rows_each) there are no slabs, no slots and no second kernel.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda::gemm {

// How a product cuts sequences.
struct RowCuts {
  int rows_each;
  int64_t slabs;
  int64_t elems;  // of a matrix, a multiple of 8

  RowCuts(const OffsetsView& offsets, int rows, int64_t elems)
      : rows_each(rows),
        slabs(offsets.total > rows ? (offsets.total + rows - 1) / rows : 0),
        elems(elems) {}

  // f32 words of `partial`.
  int64_t words() const { return 2 * slabs * elems; }

  // The arithmetic is in 32 bits.
  static bool is_possible(const OffsetsView& offsets, int64_t elems) {
    constexpr int64_t kMost = int64_t{1} << 30, kMostElems = int64_t{1} << 26;
    return offsets.total < kMost && offsets.num_seqs < kMost && elems <= kMostElems;
  }
};

#ifdef __CUDACC__

// The segment (prim/jagged.cuh) that holds `row`: of a sequence, `seq`, or outside all, -1. With wrong
// offsets `end` may lie anywhere; `begin` is not behind `row`.
struct OwnerOfRow {
  int seq;
  uint32_t begin, end;
};

// All 32 lanes of a warp together.
__device__ __forceinline__ OwnerOfRow find_owner_narrow(const OffsetsView& offsets, uint32_t row) {
  const uint32_t segments = static_cast<uint32_t>(offsets.num_seqs) + 2;
  // The first row of `low` is not behind `row`, that of `high` is.
  uint32_t low = 0, high = segments, begin = 0, end = static_cast<uint32_t>(offsets.total);
  while (high - low > 1) {
    const uint32_t step = (high - low + 32) / 33, probe = low + step * (threadIdx.x % 32 + 1);
    const bool exists = probe < high;
    const uint32_t bound = exists ? static_cast<uint32_t>(clamped_offset(offsets, probe - 1)) : 0;
    // The lanes before the first that has not passed: with wrong offsets others may follow.
    const unsigned stopped = ~__ballot_sync(0xffffffffu, exists && bound <= row);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    const uint32_t first = __shfl_sync(0xffffffffu, bound, passed - 1),
                   last = __shfl_sync(0xffffffffu, bound, passed);
    low += step * passed;
    if (passed > 0) begin = first;
    if (low + step < high) {
      high = low + step;
      end = last;
    }
  }
  const bool inside = low >= 1 && low + 1 < segments;
  return {inside ? static_cast<int>(low) - 1 : -1, begin, end};
}

struct RowPart {
  int seq;    // -1: there is no such part
  int begin;  // row of the whole tensor
  int rows;
  int slot;  // of its sums, or -1 where it is a whole sequence
};

// The first part of a sequence.
__device__ __forceinline__ RowPart first_part(const OffsetsView& offsets, const RowCuts& cuts,
                                              uint32_t seq) {
  const RowRange range = sequence_rows(offsets, seq);
  const int begin = static_cast<int>(range.begin), rows = static_cast<int>(range.len);
  if (rows <= cuts.rows_each) return {static_cast<int>(seq), begin, rows, -1};
  return {static_cast<int>(seq), begin, cuts.rows_each, (begin / cuts.rows_each + 1) * 2};
}

// The later part that begins in a slab; all 32 lanes of a warp together.
__device__ __forceinline__ RowPart later_part(const OffsetsView& offsets, const RowCuts& cuts,
                                              uint32_t slab) {
  const uint32_t each = static_cast<uint32_t>(cuts.rows_each), row = slab * each;
  const OwnerOfRow owner = find_owner_narrow(offsets, row);
  const uint32_t number = (row - owner.begin + each - 1) / each,
                 first = owner.begin + number * each;
  if (owner.seq < 0 || number == 0 || first >= owner.end) return {-1, 0, 0, -1};
  return {owner.seq, static_cast<int>(first), static_cast<int>(min(each, owner.end - first)),
          static_cast<int>(slab * 2 + 1)};
}

#endif  // __CUDACC__

}  // namespace jagged_cuda::gemm
