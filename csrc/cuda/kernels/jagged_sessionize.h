// The kernels of jagged_sessionize, as host code sees them.
#pragma once

#include "contract/sessions.h"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/rows/row_type.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

struct JaggedSessionizeParams {
  const void* time;       // [T], not null unless T is 0
  void* session_offsets;  // [sessions + 1], like offsets
  void* first_session;    // [B + 1], like offsets
  OffsetsView offsets;    // [B + 1]
  int64_t sessions;       // capacity
  SessionGap gap;
  RowType type;      // of time
  int64_t* counts;   // [num_session_ctas(T) + 1], written: starts of each CTA's rows, and of all
  uint32_t* starts;  // [num_start_words(T)], written: a bit for each row
};

// CTAs that share the rows; and words of their bits.
int64_t num_session_ctas(int64_t total);
int64_t num_start_words(int64_t total);

// Enqueues three kernels that write every element of both results. No synchronisation.
cudaError_t launch_jagged_sessionize(const JaggedSessionizeParams& params, cudaStream_t stream);

}  // namespace jagged_cuda
