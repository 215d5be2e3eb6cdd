// padded_to_jagged on CUDA: the rows of padded sequences one after another.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct PaddedToJaggedParams {
  const void* x;        // [B, M, row_units] in units
  void* out;            // [T, row_units], contiguous
  OffsetsView offsets;  // [B + 1]
  int64_t max_len;      // M
  int64_t row_units;
  int64_t x_seq_stride;  // units between sequences of x
  int64_t x_row_stride;  // units between rows of x
  int unit_bytes;        // 2, 4, 8 or 16: pointers and strides are multiples of it
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_padded_to_jagged(const PaddedToJaggedParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
