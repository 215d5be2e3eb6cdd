#include "cuda/kernels/prim/launch.cuh"

#include "contract/last_kernel.h"

namespace jagged_cuda {

cudaError_t allow_shared_memory(const void* kernel, PreparedDevices& prepared, int shared_bytes) {
  constexpr int kDefaultSharedBytes = 48 * 1024;
  if (shared_bytes <= kDefaultSharedBytes) return cudaSuccess;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device >= 64 || (prepared.load(std::memory_order_relaxed) & bit) == 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  return cudaSuccess;
}

cudaError_t launch_kernel(const Launch& launch, PreparedDevices& prepared) {
  if (!launch.grid.is_possible()) return cudaErrorInvalidConfiguration;
  cudaError_t error = allow_shared_memory(launch.kernel, prepared, launch.shared_bytes);
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<void*>(launch.params)};
  cudaLaunchKernel(launch.kernel, launch.grid.narrowed(),
                   dim3(static_cast<unsigned>(launch.threads)), arguments,
                   static_cast<size_t>(launch.shared_bytes), launch.stream);
  error = cudaGetLastError();
  if (error == cudaSuccess && launch.path != nullptr) record_kernel(launch.path);
  return error;
}

cudaError_t launch_dependent_kernel(const Launch& launch, PreparedDevices& prepared) {
  if (!has_wgmma()) return launch_kernel(launch, prepared);
  if (!launch.grid.is_possible()) return cudaErrorInvalidConfiguration;
  cudaError_t error = allow_shared_memory(launch.kernel, prepared, launch.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid.narrowed();
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<void*>(launch.params)};
  error = cudaLaunchKernelExC(&config, launch.kernel, arguments);
  if (error == cudaSuccess && launch.path != nullptr) record_kernel(launch.path);
  return error;
}

}  // namespace jagged_cuda
