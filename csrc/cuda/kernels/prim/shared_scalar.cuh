// Single elements in shared memory by address, as prim/ptx.cuh: one instruction per function
// ("Data Movement and Conversion Instructions: ld, st").
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::ptx {

// st.shared.u16 of a register's low half, ld.shared.u16, .b32 and .b64, and their stores
__device__ __forceinline__ void st_shared_2(SharedAddress shared, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(shared.value), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t ld_shared_2(SharedAddress shared) {
  uint32_t value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=r"(value) : "r"(shared.value) : "memory");
  return value;
}
__device__ __forceinline__ float ld_shared_f32(SharedAddress shared) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(shared.value) : "memory");
  return value;
}
__device__ __forceinline__ void st_shared_f32(SharedAddress shared, float value) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(shared.value), "f"(value) : "memory");
}
__device__ __forceinline__ double ld_shared_f64(SharedAddress shared) {
  double value;
  asm volatile("ld.shared.f64 %0, [%1];\n" : "=d"(value) : "r"(shared.value) : "memory");
  return value;
}
__device__ __forceinline__ void st_shared_f64(SharedAddress shared, double value) {
  asm volatile("st.shared.f64 [%0], %1;\n" ::"r"(shared.value), "d"(value) : "memory");
}

// ld.shared.v2.b32
__device__ __forceinline__ uint2 ld_shared_8(SharedAddress shared) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
               : "=r"(value.x), "=r"(value.y)
               : "r"(shared.value)
               : "memory");
  return value;
}

// The same value, of which the compiler knows nothing: it computes again what follows from it, where
// it would otherwise keep many registers.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace jagged_cuda::ptx
