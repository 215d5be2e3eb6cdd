// Warpgroup matrix products of compute capability 9.0 (wgmma, target sm_90a), and what orders them
// with other accesses to shared memory. Elsewhere the functions are empty: the kernels that call
// them are launched on 9.0 only. Sections are those of the PTX ISA manual, chapter "Instructions:
// Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "cuda/kernels/prim/sm90a.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAGGED_CUDA_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_WGMMA(...)
#endif

namespace jagged_cuda::ptx {

// fence.proxy.async.shared::cta: this thread's earlier accesses to shared memory come before later
// ones of the tensor cores ("Parallel Synchronization and Communication Instructions:
// membar/fence").
__device__ __forceinline__ void fence_proxy_async() {
  JAGGED_CUDA_WGMMA("fence.proxy.async.shared::cta;\n" :: : "memory");
}

// wgmma.fence: registers that a following wgmma reads or accumulates into have been written.
__device__ __forceinline__ void wgmma_fence() {
  JAGGED_CUDA_WGMMA("wgmma.fence.sync.aligned;\n" :: : "memory");
}

// wgmma.commit_group: the products since the last one form a group.
__device__ __forceinline__ void wgmma_commit_group() {
  JAGGED_CUDA_WGMMA("wgmma.commit_group.sync.aligned;\n" :: : "memory");
}

// wgmma.wait_group: at most the newest kPending groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  JAGGED_CUDA_WGMMA("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// setmaxnreg: this warpgroup gives registers back, or waits for as many as others have given back.
// All of its warps must execute it ("Miscellaneous Instructions: setmaxnreg").
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  JAGGED_CUDA_WGMMA("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  JAGGED_CUDA_WGMMA("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Accumulators that a product in flight writes: the compiler must not move what it computes from
// them, or into them, across this place. No instruction.
template <int kBlocks>
__device__ __forceinline__ void fence_operands(float (&c)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

// A value that the compiler knows nothing about. No instruction.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// An operand in shared memory ("Matrix Descriptor Format"): where it starts, the distance of its
// 8-row groups, that of its 64-column blocks (read only where the operand is transposed), and how
// its 16-byte chunks are exchanged.
enum class Swizzle : uint64_t { k128Bytes = 1, k64Bytes = 2 };

struct MatrixDescriptor {
  uint64_t value;

  __device__ __forceinline__ MatrixDescriptor(uint32_t shared_address, int block_bytes,
                                              int group_bytes, Swizzle swizzle)
      : value(static_cast<uint64_t>((shared_address & 0x3ffff) >> 4) |
              static_cast<uint64_t>(block_bytes >> 4) << 16 |
              static_cast<uint64_t>(group_bytes >> 4) << 32 |
              static_cast<uint64_t>(swizzle) << 62) {}

  // The operand that starts `bytes` further.
  __device__ __forceinline__ MatrixDescriptor operator+(int bytes) const {
    MatrixDescriptor moved = *this;
    moved.value += static_cast<uint64_t>(bytes >> 4);
    return moved;
  }
  // The same, known to be so in all lanes of a warp: then products take it, and what is added to it, from
  // uniform registers, where each took four moves before.
  __device__ __forceinline__ MatrixDescriptor uniform() const {
    MatrixDescriptor same = *this;
    const uint32_t low = __shfl_sync(0xffffffffu, static_cast<uint32_t>(value), 0);
    same.value = (value >> 32) << 32 | low;
    return same;
  }
};

// wgmma.mma_async.sync.aligned.m64n<8 kBlocks>k16: c = a b, or c += a b if `accumulate`, in f32.
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of c as mma_m16n8k16 does, block by block. a
// [64, 16] K-major in shared memory, or in registers as mma_m16n8k16's; b [16, 8 kBlocks], K-major
// (rows of b^T are contiguous) or, if kTransposed, the other way round. Nothing may be read or
// changed before wgmma_wait_group. An `a` in shared memory is [16, 64] instead if kTransposedA.
template <typename Element, bool kTransposed, bool kTransposedA = false>
struct Wgmma;

#define JAGGED_CUDA_C(block) \
  "+f"(c[block][0]), "+f"(c[block][1]), "+f"(c[block][2]), "+f"(c[block][3])
#define JAGGED_CUDA_C4(block) \
  JAGGED_CUDA_C(block), JAGGED_CUDA_C(block + 1), JAGGED_CUDA_C(block + 2), JAGGED_CUDA_C(block + 3)
#define JAGGED_CUDA_C8(block) JAGGED_CUDA_C4(block), JAGGED_CUDA_C4(block + 4)
#define JAGGED_CUDA_C10(block) \
  JAGGED_CUDA_C8(block), JAGGED_CUDA_C(block + 8), JAGGED_CUDA_C(block + 9)
#define JAGGED_CUDA_C12(block) JAGGED_CUDA_C8(block), JAGGED_CUDA_C4(block + 8)
#define JAGGED_CUDA_C14(block) JAGGED_CUDA_C10(block), JAGGED_CUDA_C4(block + 10)
#define JAGGED_CUDA_C16(block) JAGGED_CUDA_C8(block), JAGGED_CUDA_C8(block + 8)
#define JAGGED_CUDA_C24(block) JAGGED_CUDA_C16(block), JAGGED_CUDA_C8(block + 16)
#define JAGGED_CUDA_C32(block) JAGGED_CUDA_C16(block), JAGGED_CUDA_C16(block + 16)
#define JAGGED_CUDA_REGISTERS_4 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAGGED_CUDA_REGISTERS_8 \
  JAGGED_CUDA_REGISTERS_4       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAGGED_CUDA_REGISTERS_10 \
  JAGGED_CUDA_REGISTERS_8        \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAGGED_CUDA_REGISTERS_12 \
  JAGGED_CUDA_REGISTERS_10       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAGGED_CUDA_REGISTERS_14 \
  JAGGED_CUDA_REGISTERS_10       \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define JAGGED_CUDA_REGISTERS_16                                                     \
  JAGGED_CUDA_REGISTERS_8                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAGGED_CUDA_REGISTERS_24                                                     \
  JAGGED_CUDA_REGISTERS_16                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAGGED_CUDA_REGISTERS_32                                                                 \
  JAGGED_CUDA_REGISTERS_24                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// The two forms for kBlocks blocks. The operands behind the accumulators are numbered from 4
// kBlocks.
#define JAGGED_CUDA_WGMMA_FORMS(type, columns, blocks, p0, p1, p2, p3, p4, p5, p6)               \
  __device__ __forceinline__ static void run(float (&c)[blocks][4], MatrixDescriptor a,          \
                                             MatrixDescriptor b, bool accumulate) {              \
    JAGGED_CUDA_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                   \
                      ", 0;\n"                                                                   \
                      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type      \
                      " {" JAGGED_CUDA_REGISTERS_##blocks                                        \
                      "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p4 ", %" #p3                          \
                      ";\n}\n" : JAGGED_CUDA_C##blocks(0) : "l"(a.value),                        \
                      "l"(b.value), "r"(static_cast<int>(accumulate)), "n"(kTransposed ? 1 : 0), \
                      "n"(kTransposedA ? 1 : 0));                                                \
  }                                                                                              \
  __device__ __forceinline__ static void run(float (&c)[blocks][4], const uint32_t (&a)[4],      \
                                             MatrixDescriptor b, bool accumulate) {              \
    JAGGED_CUDA_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                                   \
                      ", 0;\n"                                                                   \
                      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type      \
                      " {" JAGGED_CUDA_REGISTERS_##blocks                                        \
                      "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, %" #p6    \
                      ";\n}\n" : JAGGED_CUDA_C##blocks(0) : "r"(a[0]),                           \
                      "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.value),                             \
                      "r"(static_cast<int>(accumulate)), "n"(kTransposed ? 1 : 0));              \
  }
#define JAGGED_CUDA_WGMMA_SHAPES(type)                                  \
  JAGGED_CUDA_WGMMA_FORMS(type, 32, 4, 16, 17, 18, 19, 20, 21, 22)      \
  JAGGED_CUDA_WGMMA_FORMS(type, 64, 8, 32, 33, 34, 35, 36, 37, 38)      \
  JAGGED_CUDA_WGMMA_FORMS(type, 80, 10, 40, 41, 42, 43, 44, 45, 46)     \
  JAGGED_CUDA_WGMMA_FORMS(type, 96, 12, 48, 49, 50, 51, 52, 53, 54)     \
  JAGGED_CUDA_WGMMA_FORMS(type, 112, 14, 56, 57, 58, 59, 60, 61, 62)    \
  JAGGED_CUDA_WGMMA_FORMS(type, 128, 16, 64, 65, 66, 67, 68, 69, 70)    \
  JAGGED_CUDA_WGMMA_FORMS(type, 192, 24, 96, 97, 98, 99, 100, 101, 102) \
  JAGGED_CUDA_WGMMA_FORMS(type, 256, 32, 128, 129, 130, 131, 132, 133, 134)

template <bool kTransposed, bool kTransposedA>
struct Wgmma<__half, kTransposed, kTransposedA> {
  JAGGED_CUDA_WGMMA_SHAPES("f16")
};
template <bool kTransposed, bool kTransposedA>
struct Wgmma<__nv_bfloat16, kTransposed, kTransposedA> {
  JAGGED_CUDA_WGMMA_SHAPES("bf16")
};

// wgmma.mma_async.sync.aligned.m64n<8 kBlocks>k8, TF32 operands: what a register of f32 has beyond
// TF32 is cut off. a [64, 8] in shared memory, or in registers as mma_m16n8k8_tf32's; both operands
// are K-major: there is no other form.
#define JAGGED_CUDA_WGMMA_TF32(columns, blocks, p0, p1, p2, p3, p4, p5)                     \
  __device__ __forceinline__ static void run(float (&c)[blocks][4], MatrixDescriptor a,     \
                                             MatrixDescriptor b, bool accumulate) {         \
    JAGGED_CUDA_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                              \
                      ", 0;\n"                                                              \
                      "wgmma.mma_async.sync.aligned.m64n" #columns                          \
                      "k8.f32.tf32.tf32"                                                    \
                      " {" JAGGED_CUDA_REGISTERS_##blocks                                   \
                      "}, %" #p0 ", %" #p1                                                  \
                      ", p, 1, 1;\n}\n" : JAGGED_CUDA_C##blocks(0) : "l"(a.value),          \
                      "l"(b.value), "r"(static_cast<int>(accumulate)));                     \
  }                                                                                         \
  __device__ __forceinline__ static void run(float (&c)[blocks][4], const uint32_t (&a)[4], \
                                             MatrixDescriptor b, bool accumulate) {         \
    JAGGED_CUDA_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                              \
                      ", 0;\n"                                                              \
                      "wgmma.mma_async.sync.aligned.m64n" #columns                          \
                      "k8.f32.tf32.tf32"                                                    \
                      " {" JAGGED_CUDA_REGISTERS_##blocks                                   \
                      "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4                  \
                      ", p, 1, 1;\n}\n" : JAGGED_CUDA_C##blocks(0) : "r"(a[0]),             \
                      "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.value),                        \
                      "r"(static_cast<int>(accumulate)));                                   \
  }
template <>
struct Wgmma<float, false, false> {
  JAGGED_CUDA_WGMMA_TF32(64, 8, 32, 33, 34, 35, 36, 37)
  JAGGED_CUDA_WGMMA_TF32(128, 16, 64, 65, 66, 67, 68, 69)
};

#undef JAGGED_CUDA_WGMMA_TF32
#undef JAGGED_CUDA_WGMMA_SHAPES
#undef JAGGED_CUDA_WGMMA_FORMS
#undef JAGGED_CUDA_REGISTERS_4
#undef JAGGED_CUDA_REGISTERS_8
#undef JAGGED_CUDA_REGISTERS_10
#undef JAGGED_CUDA_REGISTERS_12
#undef JAGGED_CUDA_REGISTERS_14
#undef JAGGED_CUDA_REGISTERS_16
#undef JAGGED_CUDA_REGISTERS_24
#undef JAGGED_CUDA_REGISTERS_32
#undef JAGGED_CUDA_C
#undef JAGGED_CUDA_C4
#undef JAGGED_CUDA_C8
#undef JAGGED_CUDA_C10
#undef JAGGED_CUDA_C12
#undef JAGGED_CUDA_C14
#undef JAGGED_CUDA_C16
#undef JAGGED_CUDA_C24
#undef JAGGED_CUDA_C32
#undef JAGGED_CUDA_WGMMA

}  // namespace jagged_cuda::ptx
