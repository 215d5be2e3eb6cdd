// Launching a kernel with as much shared memory as it asks for.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jagged_cuda {

// Launches kernel(params) on `stream` of the current device. More than 48 KiB of shared memory must
// be asked for once a device.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream) {
  constexpr int kDefaultSharedBytes = 48 * 1024;
  if (shared_bytes > kDefaultSharedBytes) {
    static std::atomic<uint64_t> prepared{0};  // a bit a device
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (device >= 64 || (prepared.load(std::memory_order_relaxed) & bit) == 0) {
      const cudaError_t error =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return error;
      prepared.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  kKernel<<<grid, threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jagged_cuda
