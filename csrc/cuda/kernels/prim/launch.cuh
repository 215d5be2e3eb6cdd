// Launching a kernel with as much shared memory as it asks for, and recording its path.
#pragma once

#include "contract/last_kernel.h"
#include "cuda/kernels/prim/hopper.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jagged_cuda {

// A path's name, put together at compile time: PathName("cuda.attention.forward.wgmma.d") + 64. A
// zero before and after it lets jagged_cuda.testing.kernel_paths find it among the library's bytes.
class PathName {
 public:
  constexpr explicit PathName(const char* text) { append(text); }

  constexpr PathName operator+(const char* text) const {
    PathName longer = *this;
    longer.append(text);
    return longer;
  }
  constexpr PathName operator+(int number) const {
    char digits[12] = {};
    int first = 11;
    do {
      digits[--first] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    return *this + (digits + first);
  }

  constexpr operator const char*() const { return text_ + 1; }

 private:
  constexpr void append(const char* text) {
    int end = 1;
    while (text_[end] != '\0') ++end;
    while (*text != '\0') text_[end++] = *text++;
  }

  char text_[96] = {};
};

// CTAs in each dimension, counted in 64 bits: a launch checks them before they are narrowed, so
// that an impossible grid is an error and never another grid.
struct Grid {
  int64_t x;
  int64_t y = 1;

  static constexpr int64_t kMaxX = 0x7fffffff, kMaxY = 65535;

  bool is_possible() const { return x > 0 && x <= kMaxX && y > 0 && y <= kMaxY; }
  dim3 narrowed() const { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }
};

// More than 48 KiB of shared memory must be asked for once per device.
template <auto kKernel>
cudaError_t allow_shared_memory(int shared_bytes) {
  constexpr int kDefaultSharedBytes = 48 * 1024;
  if (shared_bytes > kDefaultSharedBytes) {
    static std::atomic<uint64_t> prepared{0};  // one bit per device
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

// Launches kernel(params) on `stream` of the current device. `path` is the name of the path that an
// operator takes by this launch; null for a kernel that only helps another.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, const Grid& grid, int threads, int shared_bytes,
                   cudaStream_t stream, const char* path) {
  if (!grid.is_possible()) return cudaErrorInvalidConfiguration;
  cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  kKernel<<<grid.narrowed(), threads, shared_bytes, stream>>>(params);
  error = cudaGetLastError();
  if (error == cudaSuccess && path != nullptr) record_kernel(path);
  return error;
}

// The same for a kernel that calls griddepcontrol_wait before it reads what the kernel before it on
// the stream writes: on compute capability 9.0 its CTAs may start while that kernel still runs. Its
// first CTA always waits, so that it does not end before that kernel.
template <auto kKernel, typename Params>
cudaError_t launch_dependent(const Params& params, const Grid& grid, int threads, int shared_bytes,
                             cudaStream_t stream, const char* path = nullptr) {
  if (!has_wgmma()) return launch<kKernel>(params, grid, threads, shared_bytes, stream, path);
  if (!grid.is_possible()) return cudaErrorInvalidConfiguration;
  cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.narrowed();
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kKernel, params);
  if (error == cudaSuccess && path != nullptr) record_kernel(path);
  return error;
}

// Launches a kernel that, where it `overlaps`, may start while the one before it on the stream still
// runs, with which it shares nothing but inputs. The kernel calls start_overlapping.
template <auto kKernel, typename Params>
cudaError_t launch_overlapping(bool overlaps, const Params& params, const Grid& grid, int threads,
                               int shared_bytes, cudaStream_t stream, const char* path) {
  return overlaps ? launch_dependent<kKernel>(params, grid, threads, shared_bytes, stream, path)
                  : launch<kKernel>(params, grid, threads, shared_bytes, stream, path);
}

}  // namespace jagged_cuda
