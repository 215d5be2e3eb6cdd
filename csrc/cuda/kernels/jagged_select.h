// jagged_select on CUDA: the plan that keeps the rows of a mask.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

constexpr int kSelectRows = 4096;  // of a CTA

// No pointer may be null unless it says so.
struct JaggedSelectParams {
  OffsetsView offsets;  // [B + 1] into T rows
  const uint8_t* keep;  // [T], 0 for rows that go; null if T is 0
  int* counts;          // [select_tiles(T)]: rows kept of each tile
  int64_t* index;       // [total]; null if total is 0
  void* planned;        // [B + 1], like offsets
  int64_t* uncut;       // [B + 1], or null: what planned is before it is cut to the capacity
  int64_t total;
  int64_t capacity;  // at most total
};

// At least one, so that there is a CTA that writes offsets.
inline int64_t select_tiles(int64_t rows) {
  return rows > kSelectRows ? (rows + kSelectRows - 1) / kSelectRows : 1;
}

// Enqueues two kernels that write index and offsets. No synchronisation.
cudaError_t launch_jagged_select(const JaggedSelectParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
