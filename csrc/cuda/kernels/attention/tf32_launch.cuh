// Launching the f32 kernels on tensor cores for a head dim known at run time.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/tf32.h"

namespace jagged_cuda::attention {

// for_dim with Constant<16-row blocks of a warp>: two where sequences are long, in TF32 and up to
// kMostDim dims, the most that leaves registers for them.
template <bool kCompensated, int kMostDim, typename Launch>
cudaError_t for_tf32(const AttentionParams& params, Launch launch) {
  return for_dim(params, [&](auto dim) {
    constexpr int kDim = dim.value;
    if constexpr (!kCompensated && kDim >= 64 && kDim <= kMostDim) {
      if (has_long_sequences(params)) return launch(dim, Constant<2>{});
    }
    return launch(dim, Constant<1>{});
  });
}

}  // namespace jagged_cuda::attention
