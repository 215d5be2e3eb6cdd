// Launching the attention kernels for a head dim known at run time.
#pragma once

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda::attention {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls launch(Constant<bucket>) for the smallest compiled head dim, at most kMaxDim, that holds D
// and Dv.
template <int kMaxDim = 256, typename Params, typename Launch>
cudaError_t for_dim(const Params& params, Launch launch) {
  switch (dim_bucket(params)) {
    case 32:
      return launch(Constant<32>{});
    case 64:
      return launch(Constant<64>{});
    case 128:
      return launch(Constant<128>{});
    case 256:
      if constexpr (kMaxDim == 256) return launch(Constant<256>{});
  }
  return cudaErrorInvalidValue;
}

// for_dim with Constant<16-row blocks of a warp>.
template <typename Launch>
cudaError_t for_dim_and_rows(const AttentionParams& params, Launch launch) {
  return for_dim(params, [&](auto dim) {
    return has_long_sequences(params) ? launch(dim, Constant<2>{}) : launch(dim, Constant<1>{});
  });
}

inline Grid tile_grid(const OffsetsView& offsets, int tile_rows, int heads) {
  return {num_tiles(offsets.total, offsets.num_seqs, tile_rows), heads};
}

}  // namespace jagged_cuda::attention
