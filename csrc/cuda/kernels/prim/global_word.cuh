// Words of 4 bytes and halves of them, in memory and as pairs, as prim/ptx.cuh: one
// instruction per function ("Data Movement and Conversion Instructions: ld.global.nc, ld, st"; "Half
// Precision Floating Point Instructions: max").
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::ptx {

// ld.global.nc.b32 and .u16, st.global.b32 and .u16: 4 or 2 aligned bytes, if index < end. They are
// compared here, so that the compiler does not keep the answers of all indices.
__device__ __forceinline__ void ld_global_nc_4(uint32_t& value, const void* global, int index,
                                               int end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p ld.global.nc.b32 %0, [%1];\n}\n"
               : "+r"(value)
               : "l"(global), "r"(index), "r"(end));
}
// ld_global_nc_4 with a policy of L2 (l2_policy).
__device__ __forceinline__ void ld_global_nc_4_hinted(uint32_t& value, const void* global,
                                                      int index, int end, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n"
      "@p ld.global.nc.L2::cache_hint.b32 %0, [%1], %4;\n}\n"
      : "+r"(value)
      : "l"(global), "r"(index), "r"(end), "l"(policy));
}
__device__ __forceinline__ void ld_global_nc_2(uint32_t& value, const void* global, int index,
                                               int end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p ld.global.nc.u16 %0, [%1];\n}\n"
               : "+r"(value)
               : "l"(global), "r"(index), "r"(end));
}
// ld.b32 and .u16, of any memory.
__device__ __forceinline__ void ld_4(uint32_t& value, const void* data, int index, int end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p ld.b32 %0, [%1];\n}\n"
               : "+r"(value)
               : "l"(data), "r"(index), "r"(end));
}
__device__ __forceinline__ void ld_2(uint32_t& value, const void* data, int index, int end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p ld.u16 %0, [%1];\n}\n"
               : "+r"(value)
               : "l"(data), "r"(index), "r"(end));
}
__device__ __forceinline__ void st_global_4(void* global, uint32_t value, int index, int end) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p st.global.b32 [%0], %1;\n}\n" ::"l"(global),
      "r"(value), "r"(index), "r"(end)
      : "memory");
}
__device__ __forceinline__ void st_global_2(void* global, uint32_t value, int index, int end) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p st.global.u16 [%0], %1;\n}\n" ::"l"(global),
      "r"(value), "r"(index), "r"(end)
      : "memory");
}

// max.NaN.f16x2 and .bf16x2: of each half; NaN if either is.
template <typename Element>
__device__ __forceinline__ uint32_t max_nan_x2(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t max_nan_x2<__half>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <>
__device__ __forceinline__ uint32_t max_nan_x2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace jagged_cuda::ptx
