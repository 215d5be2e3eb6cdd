// Clusters of CTAs (compute capability 9.0): their barrier, their shared memory, their launch. Sections
// are those of the PTX ISA manual, chapter "Instructions". Other architectures compile to nothing: the
// host launches no cluster there (prim/hopper.h, has_wgmma).
#pragma once

#include "contract/last_kernel.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define JAGGED_CUDA_CLUSTER(...) asm volatile(__VA_ARGS__)
#else
#define JAGGED_CUDA_CLUSTER(...)
#endif

namespace jagged_cuda {

namespace ptx {

// barrier.cluster.arrive and .wait: what any thread of the cluster wrote before is seen behind it
// ("Parallel Synchronization and Communication Instructions: barrier.cluster").
__device__ __forceinline__ void barrier_cluster() {
  JAGGED_CUDA_CLUSTER("barrier.cluster.arrive.release.aligned;\n" :: : "memory");
  JAGGED_CUDA_CLUSTER("barrier.cluster.wait.acquire.aligned;\n" :: : "memory");
}

// barrier.cluster.arrive.relaxed, and .wait: all threads of the cluster that have not returned run.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  JAGGED_CUDA_CLUSTER("barrier.cluster.arrive.relaxed.aligned;\n" :: : "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  JAGGED_CUDA_CLUSTER("barrier.cluster.wait.acquire.aligned;\n" :: : "memory");
}

// %cluster_ctarank: which CTA of the cluster this is ("Special Registers").
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank = 0;
  JAGGED_CUDA_CLUSTER("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// mapa.shared::cluster: where CTA `rank` of the cluster has what lies at `shared` here ("Data Movement
// and Conversion Instructions: mapa").
__device__ __forceinline__ uint32_t mapa_shared_cluster(SharedAddress shared, uint32_t rank) {
  uint32_t address = 0;
  JAGGED_CUDA_CLUSTER("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared.value),
                      "r"(rank));
  return address;
}

// ld.shared::cluster.u32
__device__ __forceinline__ uint32_t ld_shared_cluster(uint32_t address) {
  uint32_t value = 0;
  JAGGED_CUDA_CLUSTER("ld.shared::cluster.u32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// st.async: stores to a CTA of the cluster, whose barrier counts the 4 bytes once they are there ("Data
// Movement and Conversion Instructions: st.async").
__device__ __forceinline__ void st_async(uint32_t address, uint32_t value, uint32_t barrier) {
  JAGGED_CUDA_CLUSTER(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(
          address),
      "r"(value), "r"(barrier) : "memory");
}

}  // namespace ptx

// Launches kernel(params) in clusters of `ctas` CTAs, which divide the grid; else prim/launch.cuh's
// launch.
template <auto kKernel, typename Params>
cudaError_t launch_clusters(const Params& params, const Grid& grid, int ctas, int threads,
                            cudaStream_t stream, int shared_bytes = 0, const char* path = nullptr) {
  if (!grid.is_possible()) return cudaErrorInvalidConfiguration;
  cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
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

}  // namespace jagged_cuda
