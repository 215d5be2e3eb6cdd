// What host code chooses among the attention kernels by, and their launches. Each launch serves
// every head dim up to 256 (wgmma and long backward 128), is instantiated for an element type in a .cu file beside
// its kernel, and records its path, such as "cuda.attention.forward.mma_sync.d64.rows128"
// (Config::kName).
#pragma once

#include "cuda/kernels/jagged_target_attention.h"

#include <initializer_list>

namespace jagged_cuda::attention {

// The head dim that kernels are compiled for: D and Dv, rounded up.
template <typename Params>
int dim_bucket(const Params& params) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  for (int bucket : {32, 64, 128, 256}) {
    if (dim <= bucket) return bucket;
  }
  return 0;
}

// True where sequences are long on average, which is all that the host knows of their lengths. Then
// the mma.sync kernels give a warp two blocks of 16 rows (tiles of 128 rows, then seldom half
// empty), and the wgmma backward kernels take larger steps. Larger head dims leave fewer registers,
// and gain later.
inline bool has_long_sequences(const AttentionParams& params) {
  const int64_t long_rows = dim_bucket(params) <= 64 ? 192 : 768;
  return params.q_offsets.total >= long_rows * params.q_offsets.num_seqs;
}

// 16-bit elements. cudaErrorNotSupported where an operand has no tensor map.
template <typename Element>
cudaError_t launch_forward_wgmma(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_wgmma(const AttentionBackwardParams& params, cudaStream_t stream);

template <typename Element>
cudaError_t launch_forward_mma_sync(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_mma_sync(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims up to 128, with ranges of keys, unused keys, kv_bias or silu, without other biases.
template <typename Element>
cudaError_t launch_backward_ranged(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims of 33 on, sequences of more than long_rows(): the plan in
// params.long_plan and the kernel; where long_rows() is not 0, behind another kernel on the stream.
template <typename Element>
cudaError_t launch_forward_long(const AttentionParams& params, cudaStream_t stream);
// The same in the backward pass, with the workspaces beside long_plan. dq differs from run to run by
// the order of its sums.
template <typename Element>
cudaError_t launch_backward_long(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims above 128, all sequences; two plans in params.long_plan.
template <typename Element>
cudaError_t launch_backward_wide(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims up to 64, sequences of up to kTinyRows.
template <typename Element>
cudaError_t launch_forward_tiny(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_tiny(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims up to 64, sequences of up to kShortRows that are not tiny: behind the
// kernel for tiny ones. cudaErrorNotSupported where an operand has no tensor map.
template <typename Element>
cudaError_t launch_forward_short(const AttentionParams& params, cudaStream_t stream);

// The gradients of tables, of 16-bit elements, and of f32 and f64.
template <typename Element>
cudaError_t launch_table_gradients_mma_sync(const AttentionBackwardParams& params,
                                            cudaStream_t stream);
template <typename Element>
cudaError_t launch_table_gradients_fma(const AttentionBackwardParams& params, cudaStream_t stream);

// out [outer, heads, inner] from sums [parts, outer, query_heads, inner].
struct BiasSumsParams {
  ElementType type;  // of q, k and v: the sums are f32, or f64
  const void* sums;
  void* out;
  int64_t parts;
  int64_t outer;
  int query_heads;
  int heads;  // divides query_heads
  int64_t inner;
};
cudaError_t launch_bias_sums(const BiasSumsParams& params, cudaStream_t stream);

// f32 and f64.
template <typename Element>
cudaError_t launch_forward_fma(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_fma(const AttentionBackwardParams& params, cudaStream_t stream);

// The kernels that take whatever is_general() or silu, any element: the backward pass, and where they
// are wanted the sums of tables behind it.
template <typename Element>
cudaError_t launch_backward_general(const AttentionBackwardParams& params, cudaStream_t stream) {
  constexpr bool k16Bit = sizeof(Element) == 2;
  cudaError_t error;
  if constexpr (k16Bit) {
    if (params.tile_bounds != nullptr) return launch_backward_ranged<Element>(params, stream);
    error = launch_backward_mma_sync<Element>(params, stream);
  } else {
    error = launch_backward_fma<Element>(params, stream);
  }
  if (error != cudaSuccess || params.table_ctas == 0) return error;
  if constexpr (k16Bit) {
    return launch_table_gradients_mma_sync<Element>(params, stream);
  } else {
    return launch_table_gradients_fma<Element>(params, stream);
  }
}

// Target attention, 16-bit elements.
template <typename Element>
cudaError_t launch_target_forward(const TargetAttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_target_backward(const TargetAttentionBackwardParams& params,
                                   cudaStream_t stream);

}  // namespace jagged_cuda::attention
