// Bulk copies from shared to global memory, of compute capability 9.0; those to shared memory are in
// prim/tma.cuh. As there the functions are empty elsewhere.
#pragma once

#include "cuda/kernels/prim/tma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAGGED_CUDA_BULK(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_BULK(...)
#endif

namespace jagged_cuda::ptx {

// cp.async.bulk: `bytes` in one piece to global memory; part of this thread's bulk group. Addresses and
// size are multiples of 16 ("cp.async.bulk").
__device__ __forceinline__ void cp_async_bulk_store(void* global, const void* shared, int bytes) {
  JAGGED_CUDA_BULK("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
                   "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// cp.async.bulk.wait_group.read: waits until this thread's bulk groups, but for the newest kPending,
// have read what they read.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_read_but() {
  JAGGED_CUDA_BULK("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace jagged_cuda::ptx

#undef JAGGED_CUDA_BULK
