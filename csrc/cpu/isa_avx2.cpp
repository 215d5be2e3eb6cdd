// The kernels for x86-64 with AVX2, FMA and F16C: 32-byte vectors.
#include "cpu/kernels_includes.h"

#if JAGGED_TARGET_PRAGMA
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace jagged_cuda::cpu::avx2 {
constexpr int kVectorBytes = 32;
#define JAGGED_F16C 1
#include "cpu/kernels.inl"
}  // namespace jagged_cuda::cpu::avx2
#pragma GCC pop_options
#endif

namespace jagged_cuda::cpu {
const KernelTable* avx2_kernels() {
#if JAGGED_TARGET_PRAGMA
  static constexpr KernelTable table = avx2::make_table("cpu.avx2");
  return &table;
#else
  return nullptr;
#endif
}
}  // namespace jagged_cuda::cpu
