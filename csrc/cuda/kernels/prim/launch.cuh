// Launching a kernel with as much shared memory as it asks for, and recording its path.
#pragma once

#include "cuda/kernels/prim/hopper.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

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

// The devices, a bit each, on which a kernel has been given the shared memory that it needs.
using PreparedDevices = std::atomic<uint64_t>;

// launch() or launch_dependent() of a kernel with one argument, `params`.
struct Launch {
  const void* kernel;
  const void* params;
  const Grid& grid;
  int threads;
  int shared_bytes;
  cudaStream_t stream;
  const char* path;
};

// Functions in launch.cu, and what calls them is short: it is compiled for each of a thousand kernels.
cudaError_t allow_shared_memory(const void* kernel, PreparedDevices& prepared, int shared_bytes);
cudaError_t launch_kernel(const Launch& launch, PreparedDevices& prepared);
cudaError_t launch_dependent_kernel(const Launch& launch, PreparedDevices& prepared);

template <auto kKernel>
inline PreparedDevices prepared_devices{0};

// More than 48 KiB of shared memory must be asked for once per device.
template <auto kKernel>
cudaError_t allow_shared_memory(int shared_bytes) {
  return allow_shared_memory(reinterpret_cast<const void*>(kKernel), prepared_devices<kKernel>,
                             shared_bytes);
}

// Launches kernel(params) on `stream` of the current device. `path` is the name of the path that an
// operator takes by this launch; null for a kernel that only helps another.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, const Grid& grid, int threads, int shared_bytes,
                   cudaStream_t stream, const char* path) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params)>);
  const void* kernel = reinterpret_cast<const void*>(kKernel);
  return launch_kernel({kernel, &params, grid, threads, shared_bytes, stream, path},
                       prepared_devices<kKernel>);
}

// The same for a kernel that calls griddepcontrol_wait before it reads what the kernel before it on
// the stream writes: on compute capability 9.0 its CTAs may start while that kernel still runs. Its
// first CTA always waits, so that it does not end before that kernel.
template <auto kKernel, typename Params>
cudaError_t launch_dependent(const Params& params, const Grid& grid, int threads, int shared_bytes,
                             cudaStream_t stream, const char* path = nullptr) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params)>);
  const void* kernel = reinterpret_cast<const void*>(kKernel);
  return launch_dependent_kernel({kernel, &params, grid, threads, shared_bytes, stream, path},
                                 prepared_devices<kKernel>);
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
