// jagged_to_padded on CUDA: the rows of each sequence side by side with the others', filled up.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedToPaddedParams {
  const void* x;        // [T, row_units] in units
  void* out;            // [B, M, row_units], contiguous
  OffsetsView offsets;  // [B + 1]
  int64_t max_len;      // M
  int64_t row_units;
  int64_t x_stride;  // units between rows of x
  int unit_bytes;    // 2, 4, 8 or 16: pointers and strides are multiples of it
  uint64_t fill;     // 8 bytes of what fills up, elements one after another
};

// Enqueues one kernel that writes every element of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_to_padded(const JaggedToPaddedParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
