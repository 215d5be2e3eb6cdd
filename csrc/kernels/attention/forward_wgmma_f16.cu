#include "kernels/attention/forward_wgmma.cuh"
#include "kernels/attention/launch.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_wgmma_f16(const AttentionParams& params, cudaStream_t stream) {
  return for_wgmma_dim(params, [&](auto dim) {
    using Config = ForwardWgmmaConfig<__half, dim.value>;
    return launch<forward_wgmma<Config>>(
        params, tile_grid(params.q_offsets, Config::kTileM, params.heads), Config::kThreads,
        sizeof(ForwardWgmmaStorage<Config>), stream);
  });
}

}  // namespace jagged_cuda::attention
