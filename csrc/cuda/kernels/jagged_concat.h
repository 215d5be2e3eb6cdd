// jagged_concat on CUDA, and its gradients.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

constexpr int kConcatParts = 4;

// The rows of each sequence in one of the tensors.
struct ConcatPart {
  void* data;  // [rows, row_units] in units; null without elements; only its gradient is written
  OffsetsView offsets;  // [B + 1] in `total` rows; data is null if it is dense
  int64_t each;         // rows of each sequence of a dense one
  int64_t stride;       // units between rows
};

// The offsets of all parts joined: where sequence b begins is the sum over the parts of what lies
// before it there, cut to `total`. Parts that are not there are dense and have no rows.
struct JoinedView {
  ConcatPart parts[kConcatParts];
  int64_t num_seqs;
  int64_t total;
};

// No pointer may be null unless it says so.
struct JaggedConcatParams {
  JoinedView joined;  // total: the rows of the result that offsets can say
  void* out;          // [rows, row_units], contiguous; null without elements
  void* planned;      // [B + 1]
  int64_t* uncut;     // [B + 1], or null: what planned is before it is cut
  int64_t rows;
  int64_t row_units;
  int unit_bytes;  // 1, 2, 4, 8 or 16: pointers and strides are multiples of it
  bool wide;       // planned is int64, else int32
};

struct JaggedConcatBackwardParams {
  JoinedView joined;     // its parts are written: contiguous; total: the rows of grad_out
  const void* grad_out;  // [joined.total, row_units] in units
  int64_t stride;        // units between rows of grad_out
  int64_t row_units;
  int unit_bytes;
};

// Each enqueues one kernel that writes all results. No memory of its own, no synchronisation.
cudaError_t launch_jagged_concat(const JaggedConcatParams& params, cudaStream_t stream);
cudaError_t launch_jagged_concat_backward(const JaggedConcatBackwardParams& params,
                                          cudaStream_t stream);

}  // namespace jagged_cuda
