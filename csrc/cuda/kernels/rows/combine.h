// What jagged_dense_add and jagged_dense_mul ask of the kernel that they share (rows/combine.cuh).
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements. Strides in elements.
struct CombineParams {
  const void* x;        // [T, columns]
  const void* y;        // [B, M, columns]
  void* out;            // [T, columns], contiguous
  OffsetsView offsets;  // [B + 1]
  int64_t columns;
  int64_t x_stride;
  int64_t y_seq_stride, y_row_stride;
  int64_t max_len;  // M
  bool vectors;     // lines of all three begin at multiples of 16 bytes, and have multiples of them
};

}  // namespace jagged_cuda
