// More widths of the products of prim/wgmma.cuh, both operands K-major.
#pragma once

#include "cuda/kernels/prim/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JAGGED_CUDA_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_WGMMA(...)
#endif

namespace jagged_cuda::ptx {

#define JAGGED_CUDA_C(block) \
  "+f"(c[block][0]), "+f"(c[block][1]), "+f"(c[block][2]), "+f"(c[block][3])
#define JAGGED_CUDA_C4(block) \
  JAGGED_CUDA_C(block), JAGGED_CUDA_C(block + 1), JAGGED_CUDA_C(block + 2), JAGGED_CUDA_C(block + 3)
#define JAGGED_CUDA_C12(block) \
  JAGGED_CUDA_C4(block), JAGGED_CUDA_C4(block + 4), JAGGED_CUDA_C4(block + 8)
#define JAGGED_CUDA_C24(block) JAGGED_CUDA_C12(block), JAGGED_CUDA_C12(block + 12)
#define JAGGED_CUDA_C28(block) JAGGED_CUDA_C24(block), JAGGED_CUDA_C4(block + 24)
#define JAGGED_CUDA_REGISTERS_4 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAGGED_CUDA_REGISTERS_24                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAGGED_CUDA_REGISTERS_28                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111"

// c += a b: a [64, K] and b [8 blocks, K] in shared memory. The operands behind the accumulators are
// numbered from 4 blocks; `scales` are the immediates that end the instruction.
#define JAGGED_CUDA_WIDE(blocks, shape, scales, p0, p1)                                         \
  __device__ __forceinline__ static void run(float (&c)[blocks][4], MatrixDescriptor a,         \
                                             MatrixDescriptor b) {                              \
    JAGGED_CUDA_WGMMA("wgmma.mma_async.sync.aligned." shape " {" JAGGED_CUDA_REGISTERS_##blocks \
                      "}, %" #p0 ", %" #p1 ", 1, " scales                                       \
                      ";\n" : JAGGED_CUDA_C##blocks(0) : "l"(a.value),                          \
                      "l"(b.value));                                                            \
  }

// Wgmma<Element, false>, always accumulating, of 224 columns, too; of TF32 also of 192, and of 32 with
// a in registers.
template <typename Element>
struct CommonWgmma {
  template <int kBlocks, typename A>
  __device__ __forceinline__ static void run(float (&c)[kBlocks][4], const A& a,
                                             MatrixDescriptor b) {
    Wgmma<Element, false>::run(c, a, b, true);
  }
};

template <typename Element>
struct WideWgmma;

template <>
struct WideWgmma<__half> : CommonWgmma<__half> {
  using CommonWgmma<__half>::run;
  JAGGED_CUDA_WIDE(28, "m64n224k16.f32.f16.f16", "1, 1, 0, 0", 112, 113)
};
template <>
struct WideWgmma<__nv_bfloat16> : CommonWgmma<__nv_bfloat16> {
  using CommonWgmma<__nv_bfloat16>::run;
  JAGGED_CUDA_WIDE(28, "m64n224k16.f32.bf16.bf16", "1, 1, 0, 0", 112, 113)
};
template <>
struct WideWgmma<float> : CommonWgmma<float> {
  using CommonWgmma<float>::run;
  JAGGED_CUDA_WIDE(24, "m64n192k8.f32.tf32.tf32", "1, 1", 96, 97)
  JAGGED_CUDA_WIDE(28, "m64n224k8.f32.tf32.tf32", "1, 1", 112, 113)
  __device__ __forceinline__ static void run(float (&c)[4][4], const uint32_t (&a)[4],
                                             MatrixDescriptor b) {
    JAGGED_CUDA_WGMMA(
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {" JAGGED_CUDA_REGISTERS_4
        "}, {%16, %17, %18, %19}, %20, 1, 1, 1;\n" : JAGGED_CUDA_C4(0) : "r"(a[0]),
        "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.value));
  }
};

#undef JAGGED_CUDA_WIDE
#undef JAGGED_CUDA_REGISTERS_4
#undef JAGGED_CUDA_REGISTERS_24
#undef JAGGED_CUDA_REGISTERS_28
#undef JAGGED_CUDA_C
#undef JAGGED_CUDA_C4
#undef JAGGED_CUDA_C12
#undef JAGGED_CUDA_C24
#undef JAGGED_CUDA_C28
#undef JAGGED_CUDA_WGMMA

}  // namespace jagged_cuda::ptx
