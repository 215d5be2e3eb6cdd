// The copies of sequences that jagged_index_select takes, as its kernels know them.
#pragma once

#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda::copies {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

constexpr int kCopyRows = 16;  // of a tile: those with many copies take long

// The rows of copy `copy`; none if there is no such copy.
__device__ __forceinline__ CopyRows rows_of_copy(const OffsetsView& taken, int64_t copy) {
  if (copy < 0 || copy >= taken.num_seqs) return {0, 0};
  const RowRange rows = sequence_rows(taken, copy);
  return {rows.begin, rows.len};
}

// The rows of the copy with place `place` in order; none at or past `end`.
__device__ __forceinline__ CopyRows load_copy(const CopyRows* copies, int64_t place, int64_t end) {
  if (place >= end) return {0, 0};
  const longlong2 copy = __ldg(reinterpret_cast<const longlong2*>(copies + place));
  return {copy.x, copy.y};
}

}  // namespace jagged_cuda::copies
