// jagged_index_select on CUDA: the plan that takes whole sequences by their numbers.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/rows/ranges.h"

#include <cuda_runtime_api.h>

namespace jagged_cuda {

// Enqueues up to three kernels that write index and offsets. No synchronisation.
cudaError_t launch_jagged_index_select(const RangesParams& params, cudaStream_t stream);

// No pointer may be null, except for tensors without elements.
struct SumCopiesParams {
  const void* copies;     // [N, columns]
  void* out;              // [T, columns], contiguous
  OffsetsView offsets;    // [B + 1] of out
  OffsetsView taken;      // [M + 1] of copies
  const int64_t* order;   // [M]: the copies of the first sequence, then those of the next
  const int64_t* groups;  // [B + 1]: where in order those of each sequence begin
  int64_t columns;
  int64_t stride;  // elements between rows of copies
  bool vectors;    // rows are whole vectors of 16 bytes, aligned
  ElementType type;
};

// Enqueues one kernel that writes every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_index_select_backward(const SumCopiesParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
