// Bulk copies of tensor tiles from shared memory (TMA), of compute capability 9.0; empty elsewhere. What
// waits for them is in tma.cuh. Sections are those of the PTX ISA manual, chapter "Instructions".
#pragma once

#include "cuda/kernels/prim/tma.cuh"

namespace jagged_cuda::ptx {

// cp.async.bulk.tensor.3d: shared memory to the box of `map` at these coordinates, innermost first; part
// of this thread's bulk group. What lies outside the tensor is not written ("Data Movement and Conversion
// Instructions: cp.async.bulk.tensor").
__device__ __forceinline__ void cp_async_bulk_tensor_store_3d(const CUtensorMap& map,
                                                              const void* shared, int x, int y,
                                                              int z) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(
          &map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
      : "memory");
#endif
}

}  // namespace jagged_cuda::ptx
