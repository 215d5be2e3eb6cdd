#include "cuda/kernels/attention/backward_mma_sync.cuh"
#include "cuda/kernels/attention/launch.cuh"

namespace jagged_cuda::attention {

cudaError_t backward_mma_sync_bf16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim_and_rows(params, [&](auto dim, auto row_blocks) {
    using Dq = DqConfig<__nv_bfloat16, dim.value, (dim.value <= 128 ? row_blocks.value : 1)>;
    using Dkdv = DkdvConfig<__nv_bfloat16, dim.value, (dim.value <= 64 ? row_blocks.value : 1)>;
    const cudaError_t error = launch<backward_dq_mma_sync<Dq>>(
        params, tile_grid(params.q_offsets, Dq::kRows, params.heads), Dq::kThreads,
        sizeof(DqStorage<Dq>), stream);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_mma_sync<Dkdv>>(
        params, tile_grid(params.kv_offsets, Dkdv::kRows, params.kv_heads), Dkdv::kThreads,
        sizeof(DkdvStorage<Dkdv>), stream);
  });
}

}  // namespace jagged_cuda::attention
