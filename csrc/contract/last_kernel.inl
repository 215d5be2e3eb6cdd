// Defines record_kernel, once in each library, and the function of the library's own that Python
// reads it by (ctypes, jagged_cuda.testing.last_kernel).
#include "contract/last_kernel.h"

#include <atomic>

namespace jagged_cuda {
namespace {
std::atomic<const char*> last_kernel{"none"};
}  // namespace

void record_kernel(const char* name) { last_kernel.store(name, std::memory_order_relaxed); }

}  // namespace jagged_cuda

extern "C" __attribute__((visibility("default"))) const char* JAGGED_LAST_KERNEL() {
  return jagged_cuda::last_kernel.load(std::memory_order_relaxed);
}
