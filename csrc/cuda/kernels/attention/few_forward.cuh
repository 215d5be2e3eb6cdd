// Forward of jagged_flash_attention where there are few tiles: then a launch costs more than what it
// does, so one kernel has the CTAs of two, that on wgmma (forward_wgmma.cuh) and that for tiny
// sequences (tiny_forward.cuh, tiny_wide_forward.cuh).
//
// Grid: y = heads; x = first the tiles of the former, then CTAs of the latter, numbered over x and y,
// whose warps take 16 queries of one head of a sequence each, and all of which write to the rows
// outside all sequences. One CTA per SM has as many registers as the latter want.
#pragma once

#include "cuda/kernels/attention/few_forward.h"
#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/tiny_wide_forward.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

template <typename Element, int kDim>
struct FewForwardConfig {
  using Tiles = ForwardWgmmaConfig<Element, kDim>;
  using Tiny = std::conditional_t<kDim <= 64, TinyForwardConfig<Element, kDim>,
                                  TinyWideForwardConfig<Element, kDim>>;
  static constexpr int kThreads = Tiles::kThreads, kTinyWarps = kThreads / 32;
  static constexpr int kBlocks = (kDim <= 64 ? kTinyRows : kTinyWideRows) / 16;  // of a sequence
};

struct FewForwardParams : ForwardWgmmaParams {
  unsigned tile_ctas;  // of the grid's x
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void forward_few(const __grid_constant__ FewForwardParams params) {
  using Tiles = typename Config::Tiles;
  using Tiny = typename Config::Tiny;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  const AttentionParams& attention = params.attention;
  ptx::griddepcontrol_launch_dependents();
  if (blockIdx.x < params.tile_ctas) {
    run_forward_wgmma<Tiles, false>(
        params, *reinterpret_cast<ForwardWgmmaStorage<Tiles>*>(wgmma_shared_bytes));
    return;
  }
  const unsigned heads = attention.heads, ctas = (gridDim.x - params.tile_ctas) * gridDim.y,
                 cta = (blockIdx.x - params.tile_ctas) * gridDim.y + blockIdx.y,
                 items =
                     static_cast<unsigned>(attention.q_offsets.num_seqs) * Config::kBlocks * heads;
  fill_outside(attention.q_offsets, attention.out.data, heads * attention.dim_v / 2, 0.0f, cta,
               ctas);
  fill_outside(attention.q_offsets, attention.lse, heads, -INFINITY, cta, ctas);
  const unsigned item = cta * Config::kTinyWarps + threadIdx.x / 32;
  if (item >= items) return;
  const unsigned block = item / heads, seq = block / Config::kBlocks, head = item % heads;
  const int begin = static_cast<int>(block % Config::kBlocks) * 16, lane = threadIdx.x % 32;
  if constexpr (Tiny::kDim <= 64) {
    attend_tiny<Tiny>(attention, seq, head, begin, 1, lane);
  } else {
    attend_tiny_wide<Tiny>(attention, seq, head, begin, 1, lane);
  }
}

template <typename Element>
cudaError_t launch_forward_few(const AttentionParams& attention, cudaStream_t stream) {
  const auto launch_dim = [&](auto dim) {
    using Config = FewForwardConfig<Element, dim.value>;
    using Tiles = typename Config::Tiles;
    FewForwardParams params;
    params.attention = attention;
    params.attention.longer_in_slabs = false;
    params.heads_per_cta = 1;
    const cudaError_t error = encode_forward_maps<Tiles>(params, attention);
    if (error != cudaSuccess) return error;
    Grid grid = tile_grid(params.attention, attention.q_offsets, Tiles::kTileM, attention.heads);
    params.tile_ctas = static_cast<unsigned>(grid.x);
    // A warp for each item: of y * kTinyWarps, where y is the number of heads.
    grid.x += (attention.q_offsets.num_seqs * Config::kBlocks + Config::kTinyWarps - 1) /
              Config::kTinyWarps;
    return launch<forward_few<Config>>(params, grid, Config::kThreads,
                                       sizeof(ForwardWgmmaStorage<Tiles>), stream, Tiles::kName);
  };
  return dim_bucket(attention) == 32 ? launch_dim(Constant<32>{}) : launch_dim(Constant<128>{});
}

}  // namespace jagged_cuda::attention
