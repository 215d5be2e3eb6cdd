// jagged_sum and jagged_mean on CUDA: over the rows of each sequence.
#pragma once

#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// No pointer may be null, except for tensors without elements.
struct JaggedSumParams {
  const void* x;        // [T, columns], stride 1 along columns
  void* out;            // [B, columns], contiguous
  void* partial;        // [num_sum_slots(T), columns] f32 (f64 of f64); null if that is 0
  OffsetsView offsets;  // [B + 1]
  int64_t columns;
  int64_t x_stride;  // elements between rows of x
  bool mean;         // divide by the length
  bool vectors;      // every row of x and of out is 16-byte aligned, columns fill vectors
  ElementType type;
};

constexpr int kSumTileRows = 128;

// Rows of partial sums: two for each tile of rows, so that no two long sequences share one
// (rows/sum.cuh). None where no sequence can be longer than a tile.
inline int64_t num_sum_slots(int64_t total) {
  return total > kSumTileRows ? total / (kSumTileRows / 2) + 2 : 0;
}

// Enqueues the kernels that write every row of the result. No memory of its own, no
// synchronisation.
cudaError_t launch_jagged_sum(const JaggedSumParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
