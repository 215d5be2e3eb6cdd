// Checks offsets without the host: set_checks("async").
//
// One CTA. Its threads share the indices, and each keeps the smallest at which the rule of
// contract/offsets_rule.h finds something wrong; the smallest of all is written into the error word
// unless that holds an older finding. The word is claimed by an atomic, since several streams may
// write at once, and marked as written after everything else in it.
#include "cuda/kernels/check_offsets.h"

#include <cstdint>

namespace jagged_cuda {
namespace {

constexpr int kCheckThreads = 1024;

template <typename Rule>
__device__ void check(const Rule& rule, const char* op, const char* argument, ErrorWord* error) {
  __shared__ unsigned long long first_wrong;
  constexpr unsigned long long kNowhere = ~0ull;
  if (threadIdx.x == 0) first_wrong = kNowhere;
  __syncthreads();
  for (int64_t index = threadIdx.x; index <= rule.num_seqs; index += kCheckThreads) {
    if (rule.at(index).fault != Fault::kNone) {
      atomicMin(&first_wrong, static_cast<unsigned long long>(index));
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || first_wrong == kNowhere) return;
  if (atomicCAS_system(&error->state, ErrorWord::kEmpty, ErrorWord::kClaimed) !=
      ErrorWord::kEmpty) {
    return;
  }
  error->finding = rule.at(static_cast<int64_t>(first_wrong));
  error->op = op;
  error->argument = argument;
  __threadfence_system();
  atomicExch_system(&error->state, ErrorWord::kWritten);
}

template <typename Offset>
__global__ __launch_bounds__(kCheckThreads) void check_offsets(const CheckOffsetsParams params) {
  const OffsetsRule<Offset> rule{static_cast<const Offset*>(params.offsets), params.num_seqs,
                                 params.total, params.max_len};
  check(rule, params.op, params.argument, params.error);
}

template <typename Count>
__global__ __launch_bounds__(kCheckThreads) void check_counts(const CheckCountsParams params) {
  const CountsRule<Count> rule{static_cast<const Count*>(params.counts), params.num_seqs};
  check(rule, params.op, params.argument, params.error);
}

__global__ __launch_bounds__(kCheckThreads) void check_capacity(const CheckCapacityParams params) {
  check(CapacityRule{params.needed, 0, params.capacity}, params.op, params.argument, params.error);
}

__global__ __launch_bounds__(kCheckThreads) void check_index(const CheckIndexParams params) {
  check(IndexRule{params.index, params.size, params.num_seqs}, params.op, params.argument,
        params.error);
}

template <typename Offset>
__global__ __launch_bounds__(kCheckThreads) void check_matrix_offsets(
    const CheckMatrixOffsetsParams params) {
  const MatrixOffsetsRule<Offset> rule{static_cast<const Offset*>(params.rows),
                                       static_cast<const Offset*>(params.columns),
                                       params.matrix_offsets, params.num_seqs, params.capacity};
  check(rule, params.op, params.argument, params.error);
}

}  // namespace

cudaError_t launch_check_offsets(const CheckOffsetsParams& params, cudaStream_t stream) {
  if (params.wide) {
    check_offsets<int64_t><<<1, kCheckThreads, 0, stream>>>(params);
  } else {
    check_offsets<int32_t><<<1, kCheckThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t launch_check_counts(const CheckCountsParams& params, cudaStream_t stream) {
  if (params.wide) {
    check_counts<int64_t><<<1, kCheckThreads, 0, stream>>>(params);
  } else {
    check_counts<int32_t><<<1, kCheckThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t launch_check_capacity(const CheckCapacityParams& params, cudaStream_t stream) {
  check_capacity<<<1, kCheckThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_check_index(const CheckIndexParams& params, cudaStream_t stream) {
  check_index<<<1, kCheckThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_check_matrix_offsets(const CheckMatrixOffsetsParams& params,
                                        cudaStream_t stream) {
  if (params.wide) {
    check_matrix_offsets<int64_t><<<1, kCheckThreads, 0, stream>>>(params);
  } else {
    check_matrix_offsets<int32_t><<<1, kCheckThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace jagged_cuda
