// jagged_softmax on CUDA: softmax of scale * x over the rows of each sequence, and its gradient.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedSoftmaxParams {
  const void* x;        // [T, columns], stride 1 along columns
  void* out;            // [T, columns], contiguous, 16-byte aligned
  OffsetsView offsets;  // [B + 1]
  int64_t columns;
  int64_t x_stride;  // elements between rows of x
  double scale;
  bool vectors;  // every row of x and of out is aligned to vectors of 4 elements (f64: 2)
  ElementType type;
};

struct JaggedSoftmaxBackwardParams {
  const void* grad_out;  // [T, columns], stride 1 along columns
  const void* out;       // [T, columns], stride 1 along columns
  void* grad_x;          // [T, columns], contiguous, 16-byte aligned
  OffsetsView offsets;   // [B + 1]
  int64_t columns;
  int64_t grad_out_stride;  // elements between rows of grad_out
  int64_t out_stride;       // elements between rows of out
  double scale;
  bool vectors;  // every row of all three is aligned to vectors of 4 elements (f64: 2)
  ElementType type;
};

// Each enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_softmax(const JaggedSoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_jagged_softmax_backward(const JaggedSoftmaxBackwardParams& params,
                                           cudaStream_t stream);

}  // namespace jagged_cuda
