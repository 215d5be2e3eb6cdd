// Which kernels jagged_flash_attention takes: wgmma or mma.sync for 16-bit elements, plain FMA for
// fp32 and fp64.
#include "cuda/kernels/jagged_flash_attention.h"

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/wgmma_support.h"

namespace jagged_cuda {

bool attention::takes_wgmma(const AttentionParams& params) {
  const int dim = dim_bucket(params);
  const auto copyable = [](const HeadsView& view, int64_t rows, int64_t heads) {
    return (rows <= 1 || view.row_stride > 0) && (heads <= 1 || view.head_stride > 0);
  };
  return dim <= 128 && params.aligned && !params.mma_sync_only &&
         copyable(params.q, params.q_offsets.total, params.heads) &&
         copyable(params.k, params.kv_offsets.total, params.kv_heads) &&
         copyable(params.v, params.kv_offsets.total, params.kv_heads) &&
         params.q_offsets.total < kMaxRows32 && params.kv_offsets.total < kMaxRows32 && has_wgmma();
}

bool attention::takes_tiny(const AttentionParams& params) {
  // Bytes of strides, and of a row of all heads, are 32-bit numbers; so are items and CTAs.
  const auto narrow = [](const HeadsView& view, int64_t heads) {
    constexpr int64_t kMaxElems = int64_t{1} << 30;
    return view.row_stride < kMaxElems && heads * view.head_stride < kMaxElems;
  };
  constexpr int64_t kMaxItems = int64_t{1} << 30;
  return dim_bucket(params) <= 64 && params.aligned && params.q_offsets.total < kMaxRows32 &&
         params.kv_offsets.total < kMaxRows32 &&
         params.q_offsets.num_seqs * params.heads < kMaxItems && narrow(params.q, params.heads) &&
         narrow(params.k, params.kv_heads) && narrow(params.v, params.kv_heads);
}

bool attention::all_tiny(const AttentionParams& params) {
  return (params.max_len > 0 && params.max_len <= kTinyRows) ||
         (params.q_offsets.total <= kTinyRows && params.kv_offsets.total <= kTinyRows);
}

namespace {

// "cuda.attention.<direction>.<instruction>.d<head dim bucket>" for head dims 32, 64, 128, 256. The
// second and the fourth line of each are those for long sequences (launch.h): in ".rows128" a warp
// owns 32 rows, in ".step64" an iteration takes 64.
constexpr const char* kForwardPaths[4][4] = {
    {"cuda.attention.forward.mma_sync.d32", "cuda.attention.forward.mma_sync.d64",
     "cuda.attention.forward.mma_sync.d128", "cuda.attention.forward.mma_sync.d256"},
    {"cuda.attention.forward.mma_sync.d32.rows128", "cuda.attention.forward.mma_sync.d64.rows128",
     "cuda.attention.forward.mma_sync.d128.rows128", "cuda.attention.forward.mma_sync.d256"},
    {"cuda.attention.forward.wgmma.d32", "cuda.attention.forward.wgmma.d64",
     "cuda.attention.forward.wgmma.d128", ""},
    {"cuda.attention.forward.wgmma.d32", "cuda.attention.forward.wgmma.d64",
     "cuda.attention.forward.wgmma.d128", ""}};
constexpr const char* kBackwardPaths[4][4] = {
    {"cuda.attention.backward.mma_sync.d32", "cuda.attention.backward.mma_sync.d64",
     "cuda.attention.backward.mma_sync.d128", "cuda.attention.backward.mma_sync.d256"},
    {"cuda.attention.backward.mma_sync.d32.rows128", "cuda.attention.backward.mma_sync.d64.rows128",
     "cuda.attention.backward.mma_sync.d128.rows128", "cuda.attention.backward.mma_sync.d256"},
    {"cuda.attention.backward.wgmma.d32", "cuda.attention.backward.wgmma.d64",
     "cuda.attention.backward.wgmma.d128", ""},
    {"cuda.attention.backward.wgmma.d32.step64", "cuda.attention.backward.wgmma.d64.step64",
     "cuda.attention.backward.wgmma.d128", ""}};

const char* tensor_core_path(const AttentionParams& params, const char* const (&paths)[4][4]) {
  const int kind =
      (attention::takes_wgmma(params) ? 2 : 0) + (attention::has_long_sequences(params) ? 1 : 0);
  for (int i = 0; i < 4; ++i) {
    if (attention::kDims[i] == attention::dim_bucket(params)) return paths[kind][i];
  }
  return "none";
}

// Launches the kernels for tiny sequences behind those for longer ones, where they take the operands:
// each skips what is the other's, by a sequence's own length. The path is that of the latter, or,
// where no sequence can be longer, and they are not launched, "cuda.attention.<direction>.tiny.d<head
// dim bucket>".
template <typename Params, typename Launch>
cudaError_t launch_16bit(const Params& params, cudaStream_t stream, Launch launch_longer,
                         Launch launch_tiny, const char* const (&paths)[4][4],
                         const char* const (&tiny_paths)[2], const char** path) {
  const bool with_tiny = attention::takes_tiny(params);
  if (with_tiny && attention::all_tiny(params)) {
    *path = tiny_paths[attention::dim_bucket(params) == 32 ? 0 : 1];
    return launch_tiny(params, stream);
  }
  *path = tensor_core_path(params, paths);
  Params split = params;
  split.split_by_length = with_tiny;
  const cudaError_t error = launch_longer(split, stream);
  return error == cudaSuccess && with_tiny ? launch_tiny(split, stream) : error;
}

constexpr const char* kForwardTinyPaths[2] = {"cuda.attention.forward.tiny.d32",
                                              "cuda.attention.forward.tiny.d64"};
constexpr const char* kBackwardTinyPaths[2] = {"cuda.attention.backward.tiny.d32",
                                               "cuda.attention.backward.tiny.d64"};

}  // namespace

cudaError_t launch_jagged_flash_attention(const AttentionParams& params, cudaStream_t stream,
                                          const char** path) {
  switch (params.element) {
    case AttentionElement::kFloat16:
      return launch_16bit(params, stream,
                          attention::takes_wgmma(params) ? attention::forward_wgmma_f16
                                                         : attention::forward_mma_sync_f16,
                          attention::forward_tiny_f16, kForwardPaths, kForwardTinyPaths, path);
    case AttentionElement::kBFloat16:
      return launch_16bit(params, stream,
                          attention::takes_wgmma(params) ? attention::forward_wgmma_bf16
                                                         : attention::forward_mma_sync_bf16,
                          attention::forward_tiny_bf16, kForwardPaths, kForwardTinyPaths, path);
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
      return launch_16bit(params, stream,
                          attention::takes_wgmma(params) ? attention::backward_wgmma_f16
                                                         : attention::backward_mma_sync_f16,
                          attention::backward_tiny_f16, kBackwardPaths, kBackwardTinyPaths, path);
    case AttentionElement::kBFloat16:
      return launch_16bit(params, stream,
                          attention::takes_wgmma(params) ? attention::backward_wgmma_bf16
                                                         : attention::backward_mma_sync_bf16,
                          attention::backward_tiny_bf16, kBackwardPaths, kBackwardTinyPaths, path);
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
