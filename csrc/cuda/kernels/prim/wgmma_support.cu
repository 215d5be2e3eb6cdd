#include "cuda/kernels/prim/wgmma_support.h"

#include <atomic>

namespace jagged_cuda {
namespace {

__global__ void probe() {}

}  // namespace

bool has_wgmma() {
  static std::atomic<uint64_t> known{0}, present{0};  // a bit a device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  const uint64_t bit = uint64_t{1} << device;
  if ((known.load(std::memory_order_acquire) & bit) == 0) {
    int major = 0;
    cudaFuncAttributes attributes{};
    constexpr int kHopper = 9;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        major == kHopper && cudaFuncGetAttributes(&attributes, probe) == cudaSuccess &&
        attributes.binaryVersion == kHopper * 10) {
      present.fetch_or(bit, std::memory_order_relaxed);
    }
    known.fetch_or(bit, std::memory_order_release);
  }
  return (present.load(std::memory_order_relaxed) & bit) != 0;
}

}  // namespace jagged_cuda
