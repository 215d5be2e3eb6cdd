// Shares of jagged2_softmax's vector, which are cut without regard to matrices: where matrices begin in them.
#pragma once

#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

// The last matrix that begins before `element`, or -1. All 32 lanes of a warp together.
__device__ __forceinline__ int64_t last_matrix_before(const MatricesView& matrices,
                                                      int64_t element) {
  const int lane = threadIdx.x % 32;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  int64_t low = -1, high = matrices.rows.num_seqs + 1;  // begins before it; begins not before it
  while (high - low > 1) {
    const int64_t step = (high - low + 31) >> 5, probe = low + step * (lane + 1);
    const bool before = probe < high && __ldg(gOffsets + probe) < element;
    // With wrong offsets others may follow the first that is not before it.
    const unsigned stopped = ~__ballot_sync(kAllLanes, before);
    const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
    low += step * passed;
    high = high < low + step ? high : low + step;
  }
  return low;
}

// For each of two elements the first sequence of [0, B] whose matrix begins there or behind it, B + 1
// if none does. All 32 lanes of a warp together; the two searches wait for memory together.
__device__ __forceinline__ void first_matrices_from(const MatricesView& matrices,
                                                    const int64_t (&elements)[2],
                                                    int64_t (&found)[2]) {
  const int lane = threadIdx.x % 32;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  // Begins before it; begins not before it.
  int64_t low[2] = {-1, -1}, high[2] = {matrices.rows.num_seqs + 1, matrices.rows.num_seqs + 1};
  while (high[0] - low[0] > 1 || high[1] - low[1] > 1) {
    bool before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t probe = low[i] + ((high[i] - low[i] + 31) >> 5) * (lane + 1);
      before[i] = probe < high[i] && __ldg(gOffsets + probe) < elements[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t step = (high[i] - low[i] + 31) >> 5;
      // With wrong offsets others may follow the first that is not before it.
      const unsigned stopped = ~__ballot_sync(kAllLanes, before[i]);
      const int passed = stopped == 0 ? 32 : __ffs(static_cast<int>(stopped)) - 1;
      low[i] += step * passed;
      high[i] = high[i] < low[i] + step ? high[i] : low[i] + step;
    }
  }
  found[0] = high[0];
  found[1] = high[1];
}

}  // namespace jagged_cuda::softmax
