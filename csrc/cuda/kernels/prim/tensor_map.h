// Descriptions of tensors for bulk copies (prim/tma.cuh), made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jagged_cuda {

// A [rows, heads, dim] tensor of 16-bit elements whose last dimension is contiguous; strides in
// elements, multiples of 8 (any where the extent is 1). The address is a multiple of 16 bytes.
struct TensorMapSource {
  const void* data;
  bool bfloat16;
  int64_t rows;
  int64_t heads;
  int64_t dim;
  int64_t row_stride;
  int64_t head_stride;
};

// Boxes of `box_rows` rows and `box_columns` columns of one head, stored with a swizzle as wide as
// their rows (64 or 128 bytes).
cudaError_t encode_tensor_map(CUtensorMap& map, const TensorMapSource& source, int box_rows,
                              int box_columns);

}  // namespace jagged_cuda
