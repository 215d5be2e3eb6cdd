#include "contract/last_kernel.h"

#include <atomic>

namespace jagged_cuda {
namespace {
std::atomic<const char*> last_kernel{"none"};
}  // namespace

void record_kernel(const char* name) { last_kernel.store(name, std::memory_order_relaxed); }

}  // namespace jagged_cuda

// Read through ctypes by jagged_cuda.testing.last_kernel.
extern "C" __attribute__((visibility("default"))) const char* jagged_cuda_last_kernel_cpu() {
  return jagged_cuda::last_kernel.load(std::memory_order_relaxed);
}
