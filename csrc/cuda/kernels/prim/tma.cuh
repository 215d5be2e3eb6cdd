// Bulk copies of tensor tiles to shared memory (TMA) and the barriers that they complete on, of
// compute capability 9.0. As in wgmma.cuh the functions are empty elsewhere. Sections are those of
// the PTX ISA manual, chapter "Instructions".
#pragma once

#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/sm90a.cuh"

#include <cuda.h>

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAGGED_CUDA_TMA(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_TMA(...)
#endif

namespace jagged_cuda::ptx {

// mbarrier.init: a phase completes after `arrivals` arrivals ("Parallel Synchronization and
// Communication Instructions: mbarrier").
__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, int arrivals) {
  JAGGED_CUDA_TMA("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)),
                  "r"(arrivals) : "memory");
}

// fence.mbarrier_init: the barriers that this thread initialised are ready for bulk copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  JAGGED_CUDA_TMA("fence.mbarrier_init.release.cluster;\n" :: : "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
  JAGGED_CUDA_TMA(
      "mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

// The same for `arrivals` at once.
__device__ __forceinline__ void mbarrier_arrive_count(uint64_t& barrier, int arrivals) {
  JAGGED_CUDA_TMA("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&barrier)),
                  "r"(arrivals) : "memory");
}

// mbarrier.arrive.expect_tx: arrives, and lets the phase wait for `bytes` of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, int bytes) {
  JAGGED_CUDA_TMA(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&barrier)),
      "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: waits until the phase of this parity has completed. A new barrier is in
// phase 0; waiting for parity 1 then returns at once.
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, int parity) {
  int done = 1;
  do {
    JAGGED_CUDA_TMA(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n" : "=r"(done) : "r"(shared_address(&barrier)),
        "r"(parity) : "memory");
  } while (done == 0);
}

// mbarrier.test_wait.parity: whether the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_test(uint64_t& barrier, int parity) {
  int done = 1;
  JAGGED_CUDA_TMA(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n" : "=r"(done) : "r"(shared_address(&barrier)),
      "r"(parity) : "memory");
  return done != 0;
}

// cp.async.bulk.tensor.3d: the box of `map` at these coordinates, innermost first, to shared
// memory; completes on `barrier`. What lies outside the tensor becomes zeros ("Data Movement and
// Conversion Instructions: cp.async.bulk.tensor").
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void* shared, const CUtensorMap& map, int x,
                                                        int y, int z, uint64_t& barrier) {
  JAGGED_CUDA_TMA(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];\n" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)) : "memory");
}

// The same with a policy of L2 (l2_policy).
__device__ __forceinline__ void cp_async_bulk_tensor_3d(void* shared, const CUtensorMap& map, int x,
                                                        int y, int z, uint64_t& barrier,
                                                        uint64_t policy) {
  JAGGED_CUDA_TMA(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)), "l"(policy) : "memory");
}

// cp.async.mbarrier.arrive.noinc: this thread's arrival, once its earlier cp.async are done ("Data Movement
// and Conversion Instructions: cp.async.mbarrier.arrive").
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t& barrier) {
  JAGGED_CUDA_TMA("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(
      shared_address(&barrier)) : "memory");
}

// cp.async.bulk: `bytes` in one piece to shared memory; completes on `barrier`. Addresses and size
// are multiples of 16 ("cp.async.bulk").
__device__ __forceinline__ void cp_async_bulk(void* shared, const void* global, int bytes,
                                              uint64_t& barrier) {
  JAGGED_CUDA_TMA(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}

// cp.reduce.async.bulk.add.f32: adds `bytes` of floats in one piece to global memory; part of this
// thread's bulk group ("cp.reduce.async.bulk").
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* global, const void* shared,
                                                         int bytes) {
  JAGGED_CUDA_TMA(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// cp.async.bulk: `bytes` in one piece to global memory; part of this thread's bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* global, const void* shared, int bytes) {
  JAGGED_CUDA_TMA("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
                  "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// cp.async.bulk.commit_group
__device__ __forceinline__ void cp_async_bulk_commit() {
  JAGGED_CUDA_TMA("cp.async.bulk.commit_group;\n" :: : "memory");
}

// cp.async.bulk.wait_group: waits until this thread's bulk groups are done; `.read`: until they have
// read what they read.
__device__ __forceinline__ void cp_async_bulk_wait() {
  JAGGED_CUDA_TMA("cp.async.bulk.wait_group 0;\n" :: : "memory");
}
__device__ __forceinline__ void cp_async_bulk_wait_read() {
  JAGGED_CUDA_TMA("cp.async.bulk.wait_group.read 0;\n" :: : "memory");
}

// red.global.add.v4.f32
__device__ __forceinline__ void red_global_add_16(float* global, const float (&value)[4]) {
  JAGGED_CUDA_TMA("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(global),
                  "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]) : "memory");
}

// prefetch.global.L2
__device__ __forceinline__ void prefetch_l2(const void* global) {
  JAGGED_CUDA_TMA("prefetch.global.L2 [%0];\n" ::"l"(global));
}

// prefetch.tensormap
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  JAGGED_CUDA_TMA("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

}  // namespace jagged_cuda::ptx

#undef JAGGED_CUDA_TMA
