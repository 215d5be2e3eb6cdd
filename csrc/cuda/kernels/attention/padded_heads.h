// Heads copied to rows with zeros behind their columns, and back (padded_heads.cu).
#pragma once

#include "cuda/kernels/prim/element.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda::attention {

// The head dim of copies whose rows are whole vectors of 16 bytes, of elements of 16 bits.
constexpr int64_t padded_dim(int64_t dim) { return (dim + 7) / 8 * 8; }

// [rows, heads, dim] of 16-bit elements, whose last dimension is contiguous, to [rows, heads, out_dim],
// contiguous and 16-byte aligned: columns from `dim` on are 0, those from `out_dim` on are left out.
struct HeadsCopy {
  const void* in;
  void* out;
  int64_t rows;
  int64_t heads;
  int64_t row_stride;  // elements of `in`
  int64_t head_stride;
  int dim;
  int out_dim;
};

// Copies that one launch makes.
struct HeadsCopies {
  static constexpr int kMost = 5;
  HeadsCopy copies[kMost];
  int count;

  void add(const HeadsCopy& copy) { copies[count++] = copy; }
};

cudaError_t launch_copy_heads(const HeadsCopies& copies, cudaStream_t stream);

}  // namespace jagged_cuda::attention
