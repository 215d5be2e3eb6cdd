#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/launch.cuh"

namespace jagged_cuda::attention {

cudaError_t forward_mma_sync_f16(const AttentionParams& params, cudaStream_t stream) {
  return for_dim_and_rows(params, [&](auto dim, auto row_blocks) {
    using Config = ForwardConfig<__half, dim.value, (dim.value <= 128 ? row_blocks.value : 1)>;
    return launch<forward_mma_sync<Config>>(
        params, tile_grid(params.q_offsets, Config::kTileM, params.heads), Config::kThreads,
        sizeof(ForwardStorage<Config>), stream);
  });
}

}  // namespace jagged_cuda::attention
