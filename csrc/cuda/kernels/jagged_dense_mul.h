// The kernels of jagged_dense_mul, as host code sees them.
#pragma once

#include "cuda/kernels/rows/combine.h"

#include "cuda/kernels/prim/element.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// For the gradient of y alone. No pointer may be null, except for tensors without elements. Strides in
// elements.
struct PaddedProductParams {
  const void* grad_out;  // [T, columns]
  const void* x;         // [T, columns]
  void* grad_y;          // [B, M, columns], contiguous
  OffsetsView offsets;   // [B + 1]
  int64_t columns;
  int64_t grad_stride, x_stride;
  int64_t max_len;  // M
  bool vectors;     // lines of all three begin at multiples of 16 bytes, and have multiples of them
  ElementType type;
};

// Each enqueues one kernel that writes every row of its results. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_dense_mul(const CombineParams& params, ElementType type,
                                    cudaStream_t stream);
cudaError_t launch_jagged_dense_mul_backward(const CombineBackwardParams& params,
                                             cudaStream_t stream);
cudaError_t launch_padded_product(const PaddedProductParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
