// What padded_to_jagged and jagged_broadcast ask of the kernel that they share (rows/gather.cuh).
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cstdint>

namespace jagged_cuda {

// Units are 2, 4, 8 or 16 bytes; pointers and strides are multiples of them. No pointer may be
// null, except for tensors without elements.
struct GatherParams {
  const void* x;        // [B, limit, row_units] in units, with the strides below
  void* out;            // [T, row_units], contiguous
  OffsetsView offsets;  // [B + 1]
  int64_t row_units;
  int64_t seq_stride, row_stride;  // of x, in units; row_stride 0 repeats one row
  int64_t limit;                   // rows that a sequence has in x
};

}  // namespace jagged_cuda
