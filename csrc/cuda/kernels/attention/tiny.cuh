// Launching the kernels for tiny sequences.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/tiny_backward.cuh"
#include "cuda/kernels/attention/tiny_forward.cuh"

namespace jagged_cuda::attention {

// Behind a kernel for longer sequences, which it shares nothing with, a kernel may start while that
// one still runs; else it waits for whatever is before it on the stream.
template <auto kKernel, typename Params>
cudaError_t launch_tiny(const Params& params, unsigned item_ctas, int threads, int shared_bytes,
                        cudaStream_t stream) {
  const dim3 grid(item_ctas + TinyItem::kFillCtas);
  return params.split_by_length
             ? launch_dependent<kKernel>(params, grid, threads, shared_bytes, stream)
             : launch<kKernel>(params, grid, threads, shared_bytes, stream);
}

template <typename Element>
cudaError_t launch_forward_tiny(const AttentionParams& params, cudaStream_t stream) {
  const auto run = [&](auto dim) {
    using Config = TinyForwardConfig<Element, dim.value>;
    return launch_tiny<forward_tiny<Config>>(
        params, TinyItem::ctas(params, params.heads, Config::kWarps), Config::kThreads, 0, stream);
  };
  return dim_bucket(params) == 32 ? run(Constant<32>{}) : run(Constant<64>{});
}

template <typename Element>
cudaError_t launch_backward_tiny(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto run = [&](auto dim) {
    using Config = TinyBackwardConfig<Element, dim.value>;
    // Asked for once, so for the larger of the two.
    const cudaError_t error =
        allow_shared_memory<backward_tiny<Config>>(tiny_backward_bytes<Config>(true));
    if (error != cudaSuccess) return error;
    return launch_tiny<backward_tiny<Config>>(
        params, TinyItem::ctas(params, params.kv_heads, Config::kWarps), Config::kThreads,
        tiny_backward_bytes<Config>(params.heads != params.kv_heads), stream);
  };
  return dim_bucket(params) == 32 ? run(Constant<32>{}) : run(Constant<64>{});
}

}  // namespace jagged_cuda::attention
