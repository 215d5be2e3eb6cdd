// What wide_dq and wide_dkdv (wide_backward.cuh) both use.
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct WideBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_, kRows = 64;  // of a tile of shared memory
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileM = kWarpgroups * kRows;  // queries of an item of wide_dq
  // As many as there is room for.
  static constexpr int kKeyStages = kDim == 256 ? 2 : 3, kValueStages = kDim == 256 ? 1 : 2,
                       kStages = kDim == 256 ? 2 : 3;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr PathName kName = PathName("cuda.attention.backward.wide.d") + kDim;
  static_assert(kDim == 192 || kDim == 256);
};

// Rows of a tile from `rows` on become zeros; all threads of a warpgroup, which must then meet.
template <typename Tile>
__device__ __forceinline__ void zero_rows(Tile& tile, int rows) {
  zero_tile_rows<128>(tile, rows, Tile::kRows, threadIdx.x % 128);
  ptx::fence_proxy_async();
}

}  // namespace jagged_cuda::attention
