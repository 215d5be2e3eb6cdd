// What jagged_dense_add and jagged_dense_mul ask of the kernels that they share (rows/combine.cuh,
// rows/combine_backward.cuh).
#pragma once

#include "cuda/kernels/prim/element.h"
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

// No pointer may be null unless it says so, except for tensors without elements. Strides in elements.
struct CombineBackwardParams {
  const void* grad_out;  // [T, columns]
  const void* x;         // [T, columns]; null of a sum
  const void* y;         // [B, M, columns]; null of a sum
  void* grad_x;          // [T, columns], contiguous
  void* grad_y;          // [B, M, columns], contiguous
  OffsetsView offsets;   // [B + 1]
  int64_t columns;
  int64_t grad_stride, x_stride;
  int64_t y_seq_stride, y_row_stride;
  int64_t max_len;  // M
  bool vectors;     // lines of all five begin at multiples of 16 bytes, and have multiples of them
  ElementType type;
};

}  // namespace jagged_cuda
