#include "cuda/kernels/attention/backward_wgmma.cuh"
#include "cuda/kernels/attention/launch.cuh"

namespace jagged_cuda::attention {
namespace {

template <int kDim, int kStep>
cudaError_t backward(const AttentionBackwardParams& params, cudaStream_t stream) {
  using Dq = DqWgmmaConfig<__half, kDim, kStep>;
  using Dkdv = DkdvWgmmaConfig<__half, kDim, kStep>;
  const cudaError_t error =
      launch<backward_dq_wgmma<Dq>>(params, tile_grid(params.q_offsets, Dq::kRows, params.heads),
                                    Dq::kThreads, sizeof(DqWgmmaStorage<Dq>), stream);
  if (error != cudaSuccess) return error;
  return launch_dependent<backward_dkdv_wgmma<Dkdv>>(
      params, tile_grid(params.kv_offsets, Dkdv::kRows, params.kv_heads), Dkdv::kThreads,
      sizeof(DkdvWgmmaStorage<Dkdv>), stream);
}

}  // namespace

cudaError_t backward_wgmma_f16(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_wgmma_dim(params, [&](auto dim) {
    if constexpr (dim.value <= 64) {
      if (!has_long_sequences(params)) return backward<dim.value, 32>(params, stream);
    }
    return backward<dim.value, 64>(params, stream);
  });
}

}  // namespace jagged_cuda::attention
