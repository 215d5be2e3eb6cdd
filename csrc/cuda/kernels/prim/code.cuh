// A kernel's own code, asked for before it is needed.
#pragma once

#include <cstdint>

namespace jagged_cuda::ptx {

// Asks L2 for the first `bytes` of the code of kKernel, no more than it has: the first CTAs of the grid,
// a line for each thread.
template <auto kKernel>
__device__ __forceinline__ void prefetch_code(unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned line = (blockIdx.x * blockDim.x + threadIdx.x) * 128;
  if (blockIdx.y == 0 && line < bytes)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<uint64_t>(kKernel) + line));
#endif
}

}  // namespace jagged_cuda::ptx
