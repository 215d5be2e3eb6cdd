// jagged_target_attention: its kernels by element type, and dense queries as a jagged tensor.
#include "cuda/kernels/jagged_target_attention.h"

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/launch.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jagged_cuda {
namespace {

struct QueryOffsets {
  int64_t* offsets;  // [B + 1]
  int64_t count;     // B + 1
  int64_t num_queries;
};

constexpr int kFillThreads = 256;

__global__ void fill_query_offsets(const QueryOffsets params) {
  const int64_t index = int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  if (index < params.count) params.offsets[index] = index * params.num_queries;
}

}  // namespace

cudaError_t launch_jagged_target_attention(const TargetAttentionParams& params,
                                           cudaStream_t stream) {
  return params.type == ElementType::kBf16
             ? attention::launch_target_forward<__nv_bfloat16>(params, stream)
             : attention::launch_target_forward<__half>(params, stream);
}

cudaError_t launch_jagged_target_attention_backward(const TargetAttentionBackwardParams& params,
                                                    cudaStream_t stream) {
  return params.type == ElementType::kBf16
             ? attention::launch_target_backward<__nv_bfloat16>(params, stream)
             : attention::launch_target_backward<__half>(params, stream);
}

cudaError_t launch_query_offsets(int64_t* offsets, int64_t num_seqs, int64_t num_queries,
                                 cudaStream_t stream) {
  const QueryOffsets params{offsets, num_seqs + 1, num_queries};
  const int64_t ctas = (params.count + kFillThreads - 1) / kFillThreads;
  return launch<fill_query_offsets>(params, {ctas}, kFillThreads, 0, stream, nullptr);
}

}  // namespace jagged_cuda
