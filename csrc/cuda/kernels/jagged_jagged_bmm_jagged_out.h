// jagged_jagged_bmm_jagged_out on CUDA: z_b = x_b y_b^T, for each sequence b.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/matrices.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedJaggedBmmJaggedOutParams {
  const void* x;          // [Tx, D], stride 1 along D
  const void* y;          // [Ty, D], stride 1 along D
  void* out;              // [capacity], contiguous, aligned to an element
  MatricesView matrices;  // rows: of x, columns: of y
  int64_t inner;          // D
  int64_t x_stride;       // elements between rows of x
  int64_t y_stride;       // elements between rows of y
  bool x_vectors;         // x is 16-byte aligned, as are its rows, of multiples of 16 bytes
  bool y_vectors;         // the same of y
  bool mma_sync_only;     // JAGGED_CUDA_TENSOR_CORES=mma_sync
  bool overlaps;          // the kernel before may still run: neither uses what the other writes
  ElementType type;
};

// Enqueues the product; every element of `out` is written. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_jagged_bmm_jagged_out(const JaggedJaggedBmmJaggedOutParams& params,
                                                cudaStream_t stream);

}  // namespace jagged_cuda
