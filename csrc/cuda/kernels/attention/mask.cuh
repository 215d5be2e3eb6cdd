// What a window hides, as scores.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/window.cuh"

namespace jagged_cuda::attention {

// Elements whose column their row does not see become `value`. `rows` are this lane's.
template <int kBlocks, typename Index>
__device__ __forceinline__ void replace_unseen(float (&s)[kBlocks][4], float value,
                                               const WindowOf<Index>& window,
                                               const Index (&rows)[2], Index column,
                                               Index num_columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const VisibleColumns visible(window, rows[half], column, kBlocks * 8, num_columns);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!visible.contains(block * 8 + 2 * (lane % 4) + i)) s[block][2 * half + i] = value;
      }
    }
  }
}

// The same of which `row` is this lane's first.
template <int kRowBlocks, int kBlocks, typename Index>
__device__ __forceinline__ void replace_unseen(Accumulator<kRowBlocks, kBlocks>& s, float value,
                                               const WindowOf<Index>& window, Index row,
                                               Index column, Index num_columns, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
    const Index rows[2] = {row + 16 * r, row + 16 * r + 8};
    replace_unseen(s[r], value, window, rows, column, num_columns, lane);
  }
}

// The same for rows that see all columns up to some last one, in half the instructions.
template <int kBlocks>
__device__ __forceinline__ void replace_behind(float (&s)[kBlocks][4], float value,
                                               const WindowOf<int>& window, const int (&rows)[2],
                                               int column, int num_columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int columns =
        min(rows[half] + window.diagonal + window.after + 1, num_columns) - column - 2 * (lane % 4);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (block * 8 + i >= columns) s[block][2 * half + i] = value;
      }
    }
  }
}

}  // namespace jagged_cuda::attention
