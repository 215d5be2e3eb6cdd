// Bulk copies from shared to global memory in one piece; as prim/tma.cuh, of compute capability 9.0.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAGGED_CUDA_BULK(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_BULK(...)
#endif

namespace jagged_cuda::ptx {

// cp.async.bulk: `bytes` in one piece from shared to global memory; part of this thread's bulk group.
// Addresses and size are multiples of 16 ("Data Movement and Conversion Instructions:
// cp.async.bulk").
__device__ __forceinline__ void cp_async_bulk_store(void* global, uint32_t shared, int bytes) {
  JAGGED_CUDA_BULK("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
                   "r"(shared), "r"(bytes) : "memory");
}

}  // namespace jagged_cuda::ptx

#undef JAGGED_CUDA_BULK
