#include "cpu/kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "contract/contract.h"

namespace jagged_cuda::cpu {
namespace {

enum Isa { kBaseline, kAvx2, kAvx512 };
constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

Isa machine_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every processor with AVX2 and FMA has F16C.
  if (avx512_kernels() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kAvx512;
  }
  if (avx2_kernels() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return kAvx2;
#endif
  return kBaseline;
}

}  // namespace

const KernelTable& kernel_table() {
  static const Isa best = machine_isa();
  Isa isa = best;
  if (const char* requested = std::getenv("JAGGED_CUDA_CPU_ISA")) {
    const std::string name = requested;
    if (name == kIsaNames[kBaseline]) {
      isa = kBaseline;
    } else if (name == kIsaNames[kAvx2]) {
      isa = kAvx2;
    } else if (name == kIsaNames[kAvx512]) {
      isa = kAvx512;
    } else if (!name.empty()) {
      fail("jagged_cuda: JAGGED_CUDA_CPU_ISA must be baseline, avx2 or avx512, got " + name);
    }
    if (isa > best) {
      fail(std::string("jagged_cuda: JAGGED_CUDA_CPU_ISA must be at most ") + kIsaNames[best] +
           ", the best instruction set of this machine, got " + name);
    }
  }
  return isa == kAvx512 ? *avx512_kernels() : isa == kAvx2 ? *avx2_kernels() : *baseline_kernels();
}

}  // namespace jagged_cuda::cpu
