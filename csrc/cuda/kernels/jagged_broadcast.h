// jagged_broadcast on CUDA: each row of a sequence gets what the sequence has.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedBroadcastParams {
  const void* x;        // [B, row_units] in units
  void* out;            // [T, row_units], contiguous
  OffsetsView offsets;  // [B + 1]
  int64_t row_units;
  int64_t x_stride;  // units between rows of x
  int unit_bytes;    // 2, 4, 8 or 16: pointers and strides are multiples of it
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_broadcast(const JaggedBroadcastParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
