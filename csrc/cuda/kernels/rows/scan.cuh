// Sums over the threads of a CTA, for kernels that find places by a scan.
#pragma once

#include <cstdint>

namespace jagged_cuda::rows {

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / 32;

// One number of each warp, and their sum. Two such scans of one CTA need one storage each, or a
// barrier between them.
template <typename Number>
struct ScanStorage {
  Number warps[kScanWarps];
};

// The sum of `value` over the threads before this one; `sum` becomes that over all. Every thread of
// the CTA calls it.
template <typename Number>
__device__ __forceinline__ Number sum_before(Number value, ScanStorage<Number>& storage,
                                             Number& sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Number inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Number other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) storage.warps[warp] = inclusive;
  __syncthreads();  // the sums of all warps are there
  Number before = 0;
  sum = 0;
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) {
    if (w < warp) before += storage.warps[w];
    sum += storage.warps[w];
  }
  return before + inclusive - value;
}

}  // namespace jagged_cuda::rows
