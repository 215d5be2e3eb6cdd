// The kernels for x86-64 with AVX-512 (F, BW, VL, DQ), FMA and F16C: 64-byte vectors.
#include "cpu/kernels_includes.h"

#if JAGGED_TARGET_PRAGMA
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace jagged_cuda::cpu::avx512 {
constexpr int kVectorBytes = 64;
#define JAGGED_F16C 1
#include "cpu/kernels.inl"
}  // namespace jagged_cuda::cpu::avx512
#pragma GCC pop_options
#endif

namespace jagged_cuda::cpu {
const KernelTable* avx512_kernels() {
#if JAGGED_TARGET_PRAGMA
  static constexpr KernelTable table = avx512::make_table("cpu.avx512");
  return &table;
#else
  return nullptr;
#endif
}
}  // namespace jagged_cuda::cpu
