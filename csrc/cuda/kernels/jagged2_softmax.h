// jagged2_softmax on CUDA: softmax of scale * A_b for each matrix A_b [Lx, Ly] of a vector, over
// its columns or over its rows, and its gradient.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/matrices.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements. Nobody knows how many rows the
// matrices' sides have: the totals of matrices.rows and .columns are INT64_MAX.
struct Jagged2SoftmaxParams {
  const void* a;  // [matrices.capacity], contiguous
  void* out;      // [matrices.capacity], contiguous
  MatricesView matrices;
  bool over_rows;  // else over columns
  double scale;
  ElementType type;
};

struct Jagged2SoftmaxBackwardParams {
  const void* grad_out;  // [matrices.capacity], contiguous
  const void* out;       // [matrices.capacity], contiguous
  void* grad_a;          // [matrices.capacity], contiguous
  MatricesView matrices;
  bool over_rows;
  double scale;
  ElementType type;
};

// Each enqueues one kernel that writes every element of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged2_softmax(const Jagged2SoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_jagged2_softmax_backward(const Jagged2SoftmaxBackwardParams& params,
                                            cudaStream_t stream);

}  // namespace jagged_cuda
