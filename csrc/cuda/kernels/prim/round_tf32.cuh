// Rounding to TF32.
#pragma once

#include <cstdint>

namespace jagged_cuda {

// Half a unit of TF32 is added to the bits, of which products read the first 19. cvt.rna takes twice
// as many instructions. The largest NaN, which is CUDA's own, would become a zero; its negative, and
// those that differ from that in the last 12 bits alone, still do.
__device__ __forceinline__ uint32_t round_tf32(float value) {
  constexpr int kHalfUnit = 0x1000, kLargest = 0x7fffffff;
  return static_cast<uint32_t>(min(__float_as_int(value), kLargest - kHalfUnit) + kHalfUnit);
}

}  // namespace jagged_cuda
