// Arrival of cp.async copies on a barrier in shared memory ("Data Movement and Conversion Instructions:
// cp.async.mbarrier.arrive").
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>

namespace jagged_cuda::ptx {

// cp.async.mbarrier.arrive.noinc: arrives, as one of the arrivals that the phase expects, once all
// cp.async that this thread has started are done.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t& barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&barrier))
      : "memory");
#endif
}

}  // namespace jagged_cuda::ptx
