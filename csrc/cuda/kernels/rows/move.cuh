// Copying rows to where a warp has found them, for kernels that take 32 rows of the result at a time.
#pragma once

#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda::rows {

// Writes `rows` <= 32 contiguous rows, of row_units each: lane i has found where the i-th is, null for
// a row of zeros. Lanes are beside each other along a row; what a row leaves over of the warp takes
// the next rows. All lanes of a warp together.
template <typename Unit>
__device__ __forceinline__ void copy_found_rows(const Unit* own, Unit* gOut, int rows,
                                                int64_t row_units, int lanes_log2) {
  static_assert(kRows == 32, "each lane finds one row");
  const auto found = reinterpret_cast<unsigned long long>(own);
  const int lane = threadIdx.x % 32, lanes = 1 << lanes_log2;
  const int first = lane >> lanes_log2, step = 32 >> lanes_log2;
  // All lanes stay in both loops, since each hands on what it has found.
  for (int64_t first_unit = 0; first_unit < row_units; first_unit += lanes) {
    const int64_t unit = first_unit + (lane & (lanes - 1));
    const bool exists = unit < row_units;
#pragma unroll 1
    for (int first_row = 0; first_row < rows; first_row += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first_row + first + i * step;
        const auto* gX =
            reinterpret_cast<const Unit*>(__shfl_sync(0xffffffffu, found, row % kRows));
        rX[i] = Unit{};
        if (exists && row < rows && gX != nullptr) rX[i] = __ldg(gX + unit);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first_row + first + i * step;
        if (exists && row < rows) gOut[row * row_units + unit] = rX[i];
      }
    }
  }
}

}  // namespace jagged_cuda::rows
