// What the host asks of compute capability 9.0: whether kernels of prim/wgmma.cuh can run, and
// descriptions of tensors for bulk copies (prim/tma.cuh).
#pragma once

#include "cuda/kernels/prim/element.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jagged_cuda {

// True if the current device has compute capability 9.0 and runs machine code that was compiled for
// sm_90a: a library without it falls back to the code of an older architecture there, in which
// wgmma is missing.
bool has_wgmma();

// A [rows, heads, dim] tensor of 16-bit elements or f32 whose last dimension is contiguous; strides in
// elements, multiples of 16 bytes (any where the extent is 1). The address is a multiple of 16 bytes.
// Of type kTf32 a copy rounds f32 to TF32.
struct TensorMapSource {
  const void* data;
  ElementType type;
  int64_t rows;
  int64_t heads;
  int64_t dim;
  int64_t row_stride;
  int64_t head_stride;
};

// Boxes of `box_rows` rows and `box_columns` columns of `box_heads` heads, row by row, stored with a swizzle as wide as
// their rows (64 or 128 bytes). cudaErrorNotSupported if the driver has no such description of this
// tensor, or cannot make any: then the kernels that every GPU has must serve.
cudaError_t encode_tensor_map(CUtensorMap& map, const TensorMapSource& source, int box_rows,
                              int box_columns, int box_heads = 1);

}  // namespace jagged_cuda
