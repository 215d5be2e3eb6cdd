// How the persistent kernels of jagged_target_attention get their items. Which CTA has one changes no bit.
#pragma once

#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

// Items of a persistent kernel, one after another: the first of each CTA is its own, the others are whose turn
// it is when most of the one before is copied, or with a null counter go round. One warp.
class TargetItems {
 public:
  __device__ __forceinline__ explicit TargetItems(unsigned long long* next_item)
      : index(blockIdx.x), next_item_(next_item) {}

  __device__ __forceinline__ void advance() {
    if (next_item_ == nullptr) {
      index += gridDim.x;
      return;
    }
    unsigned long long taken = 0;
    if (threadIdx.x % 32 == 0) {
      ptx::griddepcontrol_wait();  // until the counter is cleared
      taken = atomicAdd(next_item_, 1ull);
    }
    index = gridDim.x + static_cast<int64_t>(__shfl_sync(0xffffffffu, taken, 0));
  }

  int64_t index;

 private:
  unsigned long long* next_item_;
};

struct ClearItemsParams {
  unsigned long long* next_item;
};

// One thread. (A template, since files that include this are linked together.)
template <typename>
__global__ void clear_items(const __grid_constant__ ClearItemsParams params) {
  ptx::griddepcontrol_launch_dependents();
  *params.next_item = 0;
}

// Launches a persistent kernel whose items are those of params.target; where they are shared out, behind a
// kernel of one thread that clears their counter, beside which it starts. Sequences of several chunks on
// average are cut into whole ones, which are alike.
template <auto kKernel, typename Params>
cudaError_t launch_target_items(Params& params, int threads, int shared_bytes, cudaStream_t stream,
                                const char* path) {
  constexpr int kAlikeChunks = 4;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const Grid grid{params.items < num_sms ? params.items : num_sms};
  const OffsetsView& offsets = params.target.offsets;
  if (params.items <= num_sms ||
      offsets.total >= offsets.num_seqs * (int64_t{kAlikeChunks} << params.target.chunk_log2)) {
    params.target.next_item = nullptr;
    return launch<kKernel>(params, grid, threads, shared_bytes, stream, path);
  }
  error = launch<clear_items<void>>(ClearItemsParams{params.target.next_item}, {1}, 1, 0, stream,
                                    nullptr);
  if (error != cudaSuccess) return error;
  return launch_dependent<kKernel>(params, grid, threads, shared_bytes, stream, path);
}

}  // namespace jagged_cuda::attention
