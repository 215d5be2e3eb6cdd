// The kernels of matrix_offsets, as host code sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// Products that one CTA adds up.
constexpr int kMatrixOffsetsTile = 8192;

struct MatrixOffsetsParams {
  int64_t* out;           // [B + 1], not null
  const void* offsets;    // [B + 1], int64 if `wide`, else int32
  const void* y_offsets;  // [B + 1] of the same type; may be the same
  int64_t* tile_sums;     // [B / kMatrixOffsetsTile]; null for up to kMatrixOffsetsTile sequences
  int64_t num_seqs;
  bool wide;
};

// Enqueues one kernel that writes all of the result, or two for more than kMatrixOffsetsTile
// sequences. No memory of its own, no synchronisation.
cudaError_t launch_matrix_offsets(const MatrixOffsetsParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
