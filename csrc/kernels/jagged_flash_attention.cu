// Which kernels jagged_flash_attention takes: mma.sync for 16-bit elements, plain FMA for fp32 and
// fp64.
#include "kernels/jagged_flash_attention.h"

#include "kernels/attention/launch.h"

namespace jagged_cuda {
namespace {

// "cuda.attention.<direction>.mma_sync.d<head dim bucket>", of which ".rows128" are those whose
// warps own 32 rows (launch.h); 256 dims have none.
#define JAGGED_CUDA_MMA_SYNC_PATHS(direction, tile)      \
  {                                                      \
      "cuda.attention." direction ".mma_sync.d32" tile,  \
      "cuda.attention." direction ".mma_sync.d64" tile,  \
      "cuda.attention." direction ".mma_sync.d128" tile, \
      "cuda.attention." direction ".mma_sync.d256",      \
  }
constexpr const char* kForwardPaths[2][4] = {JAGGED_CUDA_MMA_SYNC_PATHS("forward", ""),
                                             JAGGED_CUDA_MMA_SYNC_PATHS("forward", ".rows128")};
constexpr const char* kBackwardPaths[2][4] = {JAGGED_CUDA_MMA_SYNC_PATHS("backward", ""),
                                              JAGGED_CUDA_MMA_SYNC_PATHS("backward", ".rows128")};
#undef JAGGED_CUDA_MMA_SYNC_PATHS

const char* mma_sync_path(const AttentionParams& params, const char* const (&paths)[2][4]) {
  for (int i = 0; i < 4; ++i) {
    if (attention::kDims[i] == attention::dim_bucket(params)) {
      return paths[attention::row_blocks(params) - 1][i];
    }
  }
  return "none";
}

}  // namespace

cudaError_t launch_jagged_flash_attention(const AttentionParams& params, cudaStream_t stream,
                                          const char** path) {
  switch (params.element) {
    case AttentionElement::kFloat16:
      *path = mma_sync_path(params, kForwardPaths);
      return attention::forward_mma_sync_f16(params, stream);
    case AttentionElement::kBFloat16:
      *path = mma_sync_path(params, kForwardPaths);
      return attention::forward_mma_sync_bf16(params, stream);
    case AttentionElement::kFloat32:
      *path = "cuda.attention.forward.simt.f32";
      return attention::forward_simt_f32(params, stream);
    case AttentionElement::kFloat64:
      *path = "cuda.attention.forward.simt.f64";
      return attention::forward_simt_f64(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_jagged_flash_attention_backward(const AttentionBackwardParams& params,
                                                   cudaStream_t stream, const char** path) {
  switch (params.element) {
    case AttentionElement::kFloat16:
      *path = mma_sync_path(params, kBackwardPaths);
      return attention::backward_mma_sync_f16(params, stream);
    case AttentionElement::kBFloat16:
      *path = mma_sync_path(params, kBackwardPaths);
      return attention::backward_mma_sync_bf16(params, stream);
    case AttentionElement::kFloat32:
      *path = "cuda.attention.backward.simt.f32";
      return attention::backward_simt_f32(params, stream);
    case AttentionElement::kFloat64:
      *path = "cuda.attention.backward.simt.f64";
      return attention::backward_simt_f64(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jagged_cuda
