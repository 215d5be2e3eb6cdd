// jagged_jagged_bmm on CUDA: z_b = x_b^T y_b, for each sequence b.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedJaggedBmmParams {
  const void* x;        // [T, D], stride 1 along D
  const void* y;        // [T, N], stride 1 along N
  void* out;            // [B, D, N], contiguous, 16-byte aligned
  float* partial;       // [num_partial_sums()]; null if that is 0
  OffsetsView offsets;  // [B + 1]
  int64_t rows;         // D
  int64_t columns;      // N
  int64_t x_stride;     // elements between rows of x
  int64_t y_stride;     // elements between rows of y
  bool x_vectors;       // x is 16-byte aligned, as are its rows, of multiples of 16 bytes
  bool y_vectors;       // the same of y
  bool mma_sync_only;   // JAGGED_CUDA_TENSOR_CORES=mma_sync
  ElementType type;
};

// How many f32 sums of parts of sequences the product leaves in `partial`, which need not be set yet.
int64_t num_partial_sums(const JaggedJaggedBmmParams& params);

// Enqueues the product; every element of `out` is written. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_jagged_bmm(const JaggedJaggedBmmParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
