// Which kernels jagged_target_attention takes, by element type, head dim and rows.
#include "cuda/kernels/jagged_target_attention.h"

#include "cuda/kernels/attention/target_launch.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda {
namespace {

// "cuda.target.<direction>.mma_sync.d<head dim bucket>.r<rows of a tile>"
constexpr const char* kForwardPaths[4][3] = {
    {"cuda.target.forward.mma_sync.d32.r16", "cuda.target.forward.mma_sync.d32.r32",
     "cuda.target.forward.mma_sync.d32.r128"},
    {"cuda.target.forward.mma_sync.d64.r16", "cuda.target.forward.mma_sync.d64.r32",
     "cuda.target.forward.mma_sync.d64.r128"},
    {"cuda.target.forward.mma_sync.d128.r16", "cuda.target.forward.mma_sync.d128.r32",
     "cuda.target.forward.mma_sync.d128.r128"},
    {"cuda.target.forward.mma_sync.d256.r16", "cuda.target.forward.mma_sync.d256.r32",
     "cuda.target.forward.mma_sync.d256.r64"},
};
constexpr const char* kBackwardPaths[4][2] = {
    {"cuda.target.backward.mma_sync.d32.r32", "cuda.target.backward.mma_sync.d32.r128"},
    {"cuda.target.backward.mma_sync.d64.r32", "cuda.target.backward.mma_sync.d64.r128"},
    {"cuda.target.backward.mma_sync.d128.r32", "cuda.target.backward.mma_sync.d128.r128"},
    {"cuda.target.backward.mma_sync.d256.r32", "cuda.target.backward.mma_sync.d256.r64"},
};

int dim_index(const TargetAttentionParams& params) {
  int index = 0;
  while (attention::kDims[index] != attention::target_dim_bucket(params)) ++index;
  return index;
}

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

cudaError_t launch_jagged_target_attention(const TargetAttentionParams& params, cudaStream_t stream,
                                           const char** path) {
  const int rows = attention::target_forward_rows(params);
  *path = kForwardPaths[dim_index(params)][rows == 16 ? 0 : (rows == 32 ? 1 : 2)];
  return params.element == AttentionElement::kFloat16
             ? attention::target_forward_f16(params, stream)
             : attention::target_forward_bf16(params, stream);
}

cudaError_t launch_jagged_target_attention_backward(const TargetAttentionBackwardParams& params,
                                                    cudaStream_t stream, const char** path) {
  *path = kBackwardPaths[dim_index(params)][attention::target_backward_tile(params) == 32 ? 0 : 1];
  return params.element == AttentionElement::kFloat16
             ? attention::target_backward_f16(params, stream)
             : attention::target_backward_bf16(params, stream);
}

cudaError_t launch_query_offsets(int64_t* offsets, int64_t num_seqs, int64_t num_queries,
                                 cudaStream_t stream) {
  const QueryOffsets params{offsets, num_seqs + 1, num_queries};
  const int64_t ctas = (params.count + kFillThreads - 1) / kFillThreads;
  return launch<fill_query_offsets>(params, dim3(static_cast<unsigned>(ctas)), kFillThreads, 0,
                                    stream);
}

}  // namespace jagged_cuda
