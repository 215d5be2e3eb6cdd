#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/simt.cuh"

namespace jagged_cuda::attention {
namespace {
// Head dims up to 64 share one kernel: fewer to compile.
template <int kDim>
using Config = SimtConfig<double, (kDim < 64 ? 64 : kDim)>;
}  // namespace

cudaError_t forward_simt_f64(const AttentionParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    using Config = Config<dim.value>;
    return launch<forward_simt<Config>>(
        params, tile_grid(params.q_offsets, Config::kTile, params.heads), Config::kThreads,
        sizeof(SimtForwardStorage<Config>), stream);
  });
}

cudaError_t backward_simt_f64(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    using Config = Config<dim.value>;
    const cudaError_t error = launch<backward_dq_simt<Config>>(
        params, tile_grid(params.q_offsets, Config::kTile, params.heads), Config::kThreads,
        sizeof(SimtBackwardStorage<Config>), stream);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_simt<Config>>(
        params, tile_grid(params.kv_offsets, Config::kTile, params.kv_heads), Config::kThreads,
        sizeof(SimtBackwardStorage<Config>), stream);
  });
}

}  // namespace jagged_cuda::attention
