// jagged_take on CUDA: rows by their numbers, and the inverse of these numbers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null but that of x, if it has no elements.
struct JaggedTakeParams {
  const void* x;         // [total, row_units] in units
  const int64_t* index;  // [rows]
  void* out;             // [rows, row_units], contiguous
  int64_t total;
  int64_t stride;  // units between rows of x
  int64_t rows;
  int64_t row_units;
  int unit_bytes;  // 1, 2, 4, 8 or 16: pointers and strides are multiples of it
};

struct InvertParams {
  const int64_t* index;  // [rows]
  int64_t* inverse;      // [total]
  int64_t rows;
  int64_t total;
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_take(const JaggedTakeParams& params, cudaStream_t stream);
// The same in a fill and a kernel.
cudaError_t launch_jagged_take_backward(const InvertParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
