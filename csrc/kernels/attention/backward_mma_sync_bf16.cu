#include "kernels/attention/backward_mma_sync.cuh"
#include "kernels/attention/launch.cuh"

namespace jagged_cuda::attention {

cudaError_t backward_mma_sync_bf16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    using Config = BackwardConfig<__nv_bfloat16, dim.value>;
    const cudaError_t error =
        launch<backward_dq_mma_sync<Config>>(params, tile_grid(params.q_offsets, Config::kRows, params.heads), Config::kThreadsDq,
                                             sizeof(DqStorage<Config>), stream);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_mma_sync<Config>>(params, tile_grid(params.kv_offsets, Config::kRows, params.kv_heads),
                                                  Config::kThreadsDkdv, sizeof(DkdvStorage<Config>), stream);
  });
}

}  // namespace jagged_cuda::attention
