// The kernel of jagged_topk, as host code sees it.
#pragma once

#include "cuda/kernels/prim/counts.cuh"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/rows/row_type.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

struct JaggedTopkParams {
  const void* score;    // [T], not null
  uint8_t* keep;        // [T], not null
  OffsetsView offsets;  // [B + 1]
  CountsView k;         // [B]
  RowType type;         // of score
};

// Enqueues one kernel, or two from 8,193 rows on, that write every row of the result. No memory of
// their own, no synchronisation.
cudaError_t launch_jagged_topk(const JaggedTopkParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
