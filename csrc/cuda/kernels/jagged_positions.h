// The kernel of jagged_positions, as host code sees it.
#pragma once

#include "cuda/kernels/prim/counts.cuh"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

struct JaggedPositionsParams {
  int32_t* out;         // [T], not null
  OffsetsView offsets;  // [B + 1]
  CountsView targets;   // [B]
  bool from_end;
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_positions(const JaggedPositionsParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
