// array_jagged_bmm_jagged_out on CUDA: z_b = A_b y_b, or A_b^T y_b, for each sequence b.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/matrices.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct ArrayJaggedBmmJaggedOutParams {
  const void* a;          // [capacity], contiguous, aligned to an element
  const void* y;          // [Ty, N], or [Tx, N] if `transpose`, stride 1 along N
  void* out;              // [Tx, N], or [Ty, N] if `transpose`, contiguous, 16-byte aligned
  MatricesView matrices;  // in a; rows: of Tx rows, columns: of Ty rows
  int64_t columns;        // N
  int64_t y_stride;       // elements between rows of y
  bool y_vectors;         // y is 16-byte aligned, as are its rows, of multiples of 16 bytes
  bool transpose;
  bool mma_sync_only;  // JAGGED_CUDA_TENSOR_CORES=mma_sync
  bool overlaps;       // the kernel before may still run: neither uses what the other writes
  ElementType type;
};

// Enqueues the product; every row of `out` is written. No memory of its own, no synchronisation.
cudaError_t launch_array_jagged_bmm_jagged_out(const ArrayJaggedBmmJaggedOutParams& params,
                                               cudaStream_t stream);

}  // namespace jagged_cuda
