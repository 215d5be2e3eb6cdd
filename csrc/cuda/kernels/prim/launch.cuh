// Launching a kernel with as much shared memory as it asks for.
#pragma once

#include "cuda/kernels/prim/wgmma_support.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jagged_cuda {

// More than 48 KiB of shared memory must be asked for once a device.
template <auto kKernel>
cudaError_t allow_shared_memory(int shared_bytes) {
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
  return cudaSuccess;
}

// Launches kernel(params) on `stream` of the current device.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  kKernel<<<grid, threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

// The same for a kernel that calls griddepcontrol_wait before it reads what the kernel before it on
// the stream writes: on compute capability 9.0 its CTAs may start while that kernel still runs. Its
// first CTA always waits, so that it does not end before that kernel.
template <auto kKernel, typename Params>
cudaError_t launch_dependent(const Params& params, dim3 grid, int threads, int shared_bytes,
                             cudaStream_t stream) {
  if (!has_wgmma()) return launch<kKernel>(params, grid, threads, shared_bytes, stream);
  const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace jagged_cuda
