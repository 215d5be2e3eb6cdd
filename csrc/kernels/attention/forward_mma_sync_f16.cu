#include "kernels/attention/forward_mma_sync.cuh"
#include "kernels/attention/launch.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_mma_sync_f16(const AttentionParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    using Config = ForwardConfig<__half, dim.value>;
    return launch<forward_mma_sync<Config>>(params, tile_grid(params.q_offsets, Config::kTileM, params.heads), Config::kThreads,
                                            sizeof(ForwardStorage<Config>), stream);
  });
}

}  // namespace jagged_cuda::attention
