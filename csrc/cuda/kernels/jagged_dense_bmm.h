// jagged_dense_bmm on CUDA: z_b = activation(x_b y_b + bias_b), for each sequence b.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"
#include "contract/activation.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for bias and for tensors without elements.
struct JaggedDenseBmmParams {
  const void* x;         // [T, D], stride 1 along D
  const void* y;         // [B, D, N], stride 1 along D or along N
  const void* bias;      // [B, N], stride 1 along N, or null
  void* out;             // [T, N], contiguous, 16-byte aligned
  OffsetsView offsets;   // [B + 1]
  int64_t inner;         // D
  int64_t columns;       // N
  int64_t x_stride;      // elements between rows of x
  int64_t y_seq_stride;  // elements between matrices of y
  int64_t bias_stride;   // elements between rows of bias
  int64_t y_stride;      // elements along the dimension of y, D or N, whose stride is not 1
  bool y_along_inner;    // y has stride 1 along D
  bool x_vectors;        // x is 16-byte aligned, as are its rows, of multiples of 16 bytes
  bool y_vectors;        // the same of y, of its lines and its matrices
  bool mma_sync_only;    // JAGGED_CUDA_TENSOR_CORES=mma_sync
  Activation activation;
  bool overlaps;  // the kernel before may still run: neither uses what the other writes
  ElementType type;
};

// Enqueues the product; every row of `out` is written. No memory of its own, no synchronisation.
cudaError_t launch_jagged_dense_bmm(const JaggedDenseBmmParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
