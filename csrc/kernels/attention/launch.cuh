// Launching the attention kernels for a head dim known at run time.
#pragma once

#include "kernels/attention/launch.h"
#include "kernels/prim/launch.cuh"

namespace jagged_cuda::attention {

template <int kDim>
struct DimTag {
  static constexpr int value = kDim;
};

// Calls launch(DimTag<bucket>) for the smallest compiled head dim that holds D and Dv.
template <typename Launch>
cudaError_t for_dim(const AttentionParams& params, Launch launch) {
  switch (dim_bucket(params)) {
    case 32:
      return launch(DimTag<32>{});
    case 64:
      return launch(DimTag<64>{});
    case 128:
      return launch(DimTag<128>{});
    case 256:
      return launch(DimTag<256>{});
  }
  return cudaErrorInvalidValue;
}

inline dim3 tile_grid(const OffsetsView& offsets, int tile_rows, int heads) {
  return dim3(static_cast<unsigned>(num_tiles(offsets.total, offsets.num_seqs, tile_rows)), static_cast<unsigned>(heads));
}

}  // namespace jagged_cuda::attention
