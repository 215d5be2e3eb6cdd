// The kernels for any processor: 16-byte vectors (SSE2 on x86-64), no instruction beyond the
// compiler's default.
#include "cpu/kernels_includes.h"

namespace jagged_cuda::cpu::baseline {
constexpr int kVectorBytes = 16;
#define JAGGED_F16C 0
#include "cpu/kernels.inl"
}  // namespace jagged_cuda::cpu::baseline

namespace jagged_cuda::cpu {
const KernelTable* baseline_kernels() {
  static constexpr KernelTable table = baseline::make_table("cpu.baseline");
  return &table;
}
}  // namespace jagged_cuda::cpu
