// The kernels of layer_norm_mul_dropout, as host code sees them.
#pragma once

#include "cuda/kernels/prim/element.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except where it says so and for tensors without elements. Strides in
// elements; last dimensions are contiguous.
struct LayerNormMulDropoutParams {
  const void* x;        // [T, D]
  const void* u;        // [T, D]
  const void* weight;   // [D] in the type of sums
  const void* bias;     // [D] in the type of sums
  const int64_t* seed;  // [1]; null: nothing is dropped
  void* out;            // [T, D], contiguous; forward only
  int64_t total, columns;
  int64_t x_stride, u_stride;
  double eps;
  uint32_t drop_up_to;  // random words up to this one drop their element (contract/dropout.h)
  double kept_scale;    // 1 / (1 - p)
  bool vectors;         // lines of all operands begin at multiples of 16 bytes, and have multiples
  ElementType type;
};

// Partial sums that the backward pass needs: [num_partials, 2, D] in the type of sums, and for rows
// that it does not keep in registers their statistics.
struct LayerNormWorkspace {
  int64_t num_partials;
  bool needs_statistics;
};

struct LayerNormMulDropoutBackwardParams {
  LayerNormMulDropoutParams forward;
  const void* grad_out;  // [T, D]
  int64_t grad_stride;
  void *grad_x, *grad_u;          // [T, D], contiguous
  void *grad_weight, *grad_bias;  // [D] in the type of sums
  void* partial;                  // [num_partials, 2, D]
  void* statistics;               // [T, 2] mean and 1 / standard deviation, or null
  LayerNormWorkspace workspace;
};

// One kernel that writes every element of out. T and D are above 0.
cudaError_t launch_layer_norm_mul_dropout(const LayerNormMulDropoutParams& params,
                                          cudaStream_t stream);

// What a backward pass needs on the current device.
cudaError_t layer_norm_workspace(const LayerNormMulDropoutParams& params,
                                 LayerNormWorkspace& workspace);

// Two kernels (three for rows that are not kept in registers) that write every element of the four
// gradients.
cudaError_t launch_layer_norm_mul_dropout_backward(const LayerNormMulDropoutBackwardParams& params,
                                                   cudaStream_t stream);

}  // namespace jagged_cuda
