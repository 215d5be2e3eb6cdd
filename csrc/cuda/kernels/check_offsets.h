// The kernels that check offsets on the device, as host code sees them.
#pragma once

#include "contract/offsets_rule.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jagged_cuda {

// Where a kernel leaves what it finds: pinned host memory that every GPU can write. The host reads
// it without waiting for anything, so `state` is written last.
struct ErrorWord {
  enum State : int32_t { kEmpty, kClaimed, kWritten };
  int32_t state;
  Finding finding;
  // Literals of the host, which the device only hands back.
  const char* op;
  const char* argument;
};

// offsets [num_seqs + 1], int64 if `wide`, else int32.
struct CheckOffsetsParams {
  const void* offsets;
  bool wide;
  int64_t num_seqs;
  int64_t total;
  int64_t max_len;
  const char* op;
  const char* argument;
  ErrorWord* error;
};

// counts [num_seqs + 1], int64 if `wide`, else int32.
struct CheckCountsParams {
  const void* counts;
  bool wide;
  int64_t num_seqs;
  const char* op;
  const char* argument;
  ErrorWord* error;
};

// needed [1] of `capacity` elements.
struct CheckCapacityParams {
  const int64_t* needed;
  int64_t capacity;
  const char* op;
  const char* argument;
  ErrorWord* error;
};

// rows and columns [num_seqs + 1], int64 if `wide`, else int32; matrix_offsets [num_seqs + 1].
struct CheckMatrixOffsetsParams {
  const void* rows;
  const void* columns;
  const int64_t* matrix_offsets;
  bool wide;
  int64_t num_seqs;
  int64_t capacity;
  const char* op;
  const char* argument;
  ErrorWord* error;
};

// index [size], each the number of one of num_seqs sequences.
struct CheckIndexParams {
  const int64_t* index;
  int64_t size;
  int64_t num_seqs;
  const char* op;
  const char* argument;
  ErrorWord* error;
};

cudaError_t launch_check_offsets(const CheckOffsetsParams& params, cudaStream_t stream);
cudaError_t launch_check_counts(const CheckCountsParams& params, cudaStream_t stream);
cudaError_t launch_check_capacity(const CheckCapacityParams& params, cudaStream_t stream);
cudaError_t launch_check_index(const CheckIndexParams& params, cudaStream_t stream);
cudaError_t launch_check_matrix_offsets(const CheckMatrixOffsetsParams& params,
                                        cudaStream_t stream);

}  // namespace jagged_cuda
