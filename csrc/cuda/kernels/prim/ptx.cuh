// PTX, one instruction per function, named for the mnemonic. Sections are those of the PTX ISA
// manual, chapter "Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jagged_cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An operand in shared memory: a pointer, or an address that was computed from one. In a loop the
// latter saves 64-bit arithmetic.
struct SharedAddress {
  uint32_t value;
  __device__ __forceinline__ SharedAddress(const void* pointer) : value(shared_address(pointer)) {}
  __device__ __forceinline__ SharedAddress(uint32_t address) : value(address) {}
};

// ld.global.nc.v4.b32 and .v2.b32: 16 or 8 aligned bytes that no one writes meanwhile; zeros, and no
// access, unless `valid` ("Data Movement and Conversion Instructions: ld.global.nc"). Spelled out,
// since the compiler may split a vector.
__device__ __forceinline__ uint4 ld_global_nc_16(const void* global, bool valid) {
  uint4 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}
__device__ __forceinline__ uint2 ld_global_nc_8(const void* global, bool valid) {
  uint2 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}\n"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}

// st.global.v4.b32
__device__ __forceinline__ void st_global_16(void* global, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(global), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// ld.acquire.gpu.global.s32
__device__ __forceinline__ int ld_acquire_gpu(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// red.release.gpu.global.add.s32
__device__ __forceinline__ void red_release_gpu_add(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(global), "r"(value) : "memory");
}

// st.shared.b32
__device__ __forceinline__ void st_shared_4(SharedAddress shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared.value), "r"(value) : "memory");
}

// st.shared.v4.b32
__device__ __forceinline__ void st_shared_16(SharedAddress shared, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared.value), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}

// ld.shared.b32
__device__ __forceinline__ uint32_t ld_shared_4(SharedAddress shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(shared.value) : "memory");
  return value;
}

// ld.shared.v4.b32
__device__ __forceinline__ uint4 ld_shared_16(SharedAddress shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared.value)
               : "memory");
  return value;
}

// cp.async.cg.shared.global, 16 bytes: the first `source_bytes` are read, the rest are zeros
// ("Data Movement and Conversion Instructions: cp.async"). Both addresses must be 16-byte
// aligned; with 0 source bytes nothing is read.
__device__ __forceinline__ void cp_async_16(SharedAddress shared, const void* global,
                                            int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared.value), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// createpolicy.fractional: how L2 keeps what is read with it. What is read once goes first, so that it does
// not displace what is read again ("Data Movement and Conversion Instructions: createpolicy").
__device__ __forceinline__ uint64_t l2_policy(bool is_read_once) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(normal));
  return is_read_once ? first : normal;
}

// cp_async_16 with a policy of L2.
__device__ __forceinline__ void cp_async_16(SharedAddress shared, const void* global,
                                            int source_bytes, uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(shared.value),
      "l"(global), "r"(source_bytes), "l"(policy)
      : "memory");
}

// cp.async.ca.shared.global, 8 and 4 bytes.
__device__ __forceinline__ void cp_async_8(SharedAddress shared, const void* global,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared.value), "l"(global),
               "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(SharedAddress shared, const void* global,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared.value), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// cp.async.wait_group: waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16 ("Warp-level matrix load instruction: ldmatrix"): lane i
// names row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SharedAddress shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared.value)
               : "memory");
}

// The same with each 8x8 matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared.value)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x2.shared.b16: two matrices, named by lanes 0 to 15.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], SharedAddress shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared.value)
               : "memory");
}

// The same with each 8x8 matrix transposed.
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], SharedAddress shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared.value)
               : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16 ("Warp-level matrix store instruction: stmatrix"), of
// compute capability 9.0, else nothing: lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(SharedAddress shared, const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared.value),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

// movmatrix.sync.aligned.m8n8.trans.b16: an 8x8 matrix of which lane l holds columns 2 (l % 4) + {0,
// 1} of row l / 4, transposed ("Warp-level matrix transpose instruction: movmatrix").
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(matrix));
  return result;
}

// mma.sync.aligned.m16n8k16.row.col, c += a b in f32 ("Warp-level matrix instructions: mma"). a
// [16, 16] row-major, b [16, 8] column-major; lane l holds c[l / 4 + 8 (i / 2)][2 (l % 4) + i % 2]
// in c[i].
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k8.row.col, the same with half as many terms: a [16, 8], b [8, 8].
template <typename Element>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b);

template <>
__device__ __forceinline__ void mma_m16n8k8<__half>(float (&c)[4], const uint32_t (&a)[2],
                                                    uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "
      "%2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k8<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[2],
                                                           uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
      "%1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// mma.sync.aligned.m16n8k8.row.col, tf32 operands, c += a b in f32; lane l holds a[l / 4 + 8 (i %
// 2)][l % 4 + 4 (i / 2)] and b[l % 4 + 4 i][l / 4].
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rna.tf32.f32: to the nearest TF32 value, ties away from zero ("cvt").
__device__ __forceinline__ uint32_t cvt_rna_tf32(float value) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(result) : "f"(value));
  return result;
}

// max.NaN.f32: NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ex2.approx.ftz.f32: 2^x; -inf gives 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// rcp.approx.ftz.f32: 1 / x, to 1 unit in the last place.
__device__ __forceinline__ float rcp_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// lg2.approx.ftz.f32: log2(x), to 2^-22.
__device__ __forceinline__ float lg2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// griddepcontrol.launch_dependents: the next kernel of the stream may start, if it was launched by
// launch_dependent, when all CTAs have said so or are done ("Parallel Synchronization and
// Communication Instructions: griddepcontrol"; compute capability 9.0, else nothing).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// griddepcontrol.wait: waits until the kernel before is done and what it wrote can be read.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// %tid.x, read anew at each call, so that the compiler keeps neither it nor what follows from it in
// registers ("Special Registers: %tid").
__device__ __forceinline__ int tid_x() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// bar.sync ("Parallel Synchronization and Communication Instructions: bar"): `threads` threads of
// the CTA meet at barrier `id`; 0 is that of __syncthreads.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// bar.red.or: bar.sync that returns whether any of the threads says so.
__device__ __forceinline__ bool bar_red_or(int id, int threads, bool value) {
  int result;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n}\n"
      : "=r"(result)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return result != 0;
}

// bar.arrive: counts as one of the `threads` that meet at barrier `id`, and does not wait for them.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jagged_cuda::ptx
