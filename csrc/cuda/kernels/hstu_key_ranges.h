// The kernel of hstu_key_ranges, as host code sees it.
#pragma once

#include "contract/hstu_rule.h"
#include "cuda/kernels/prim/counts.cuh"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

struct HstuKeyRangesParams {
  OffsetsView q_offsets;   // [B + 1]
  OffsetsView kv_offsets;  // [B + 1]; its total bounds nothing
  CountsView targets;      // [B]
  CountsView contextual;   // [B]
  HstuRule rule;
  KeyIntervals* out;  // [q_offsets.total], not null
};

cudaError_t launch_hstu_key_ranges(const HstuKeyRangesParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
