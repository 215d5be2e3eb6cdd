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

// Whether kernels of 96 columns, where there are some, spare a quarter of the products of 128.
template <typename Params>
bool fits_96(const Params& params) {
  return dim_bucket(params) == 128 && params.dim_qk <= 96 && params.dim_v <= 96;
}

// Whether few tiles of 64 rows are looked for in slabs, self-attention only: where that leaves out a third
// of those to look at.
inline bool looks_in_slabs(const AttentionParams& params) {
  const int64_t total = params.q_offsets.total;
  return params.q_offsets.data == params.kv_offsets.data &&
         3 * num_longer_tiles(total, tiny_limit(params)) <=
             2 * num_tiles(total, params.q_offsets.num_seqs, 64);
}

// True where sequences are long on average, which is all that the host knows of their lengths. Then
// the mma.sync kernels give a warp two blocks of 16 rows (tiles of 128 rows, then seldom half
// empty), and the wgmma backward kernels take larger steps. Larger head dims leave fewer registers,
// and gain later.
inline bool has_long_sequences(const AttentionParams& params) {
  const int64_t long_rows = dim_bucket(params) <= 64 ? 192 : 768;
  return params.q_offsets.total >= long_rows * params.q_offsets.num_seqs;
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls launch(Constant<bucket>) for the smallest compiled head dim, at most kMaxDim, that holds D
// and Dv.
template <int kMaxDim = 256, typename Params, typename Launch>
cudaError_t for_dim(const Params& params, Launch launch) {
  switch (dim_bucket(params)) {
    case 32:
      return launch(Constant<32>{});
    case 64:
      return launch(Constant<64>{});
    case 128:
      if constexpr (kMaxDim >= 128) return launch(Constant<128>{});
      return cudaErrorInvalidValue;
    case 256:
      if constexpr (kMaxDim >= 256) return launch(Constant<256>{});
  }
  return cudaErrorInvalidValue;
}

// 16-bit elements. cudaErrorNotSupported where an operand has no tensor map.
template <typename Element>
cudaError_t launch_forward_wgmma(const AttentionParams& params, cudaStream_t stream);
// Of its two kernels that for dk and dv needs what that for dq leaves in params.delta.
enum class BackwardPart { kAll, kDq, kDkdv };
template <typename Element>
cudaError_t launch_backward_wgmma(const AttentionBackwardParams& params, BackwardPart part,
                                  cudaStream_t stream);

// The same for head dims of 65 to 128, by bulk copies, which grad_out allows: copyable().
template <typename Element>
cudaError_t launch_backward_bulk(const AttentionBackwardParams& params, BackwardPart part,
                                 cudaStream_t stream);

// The kernels of a head dim. They are compiled in files of their own (backward_128_f16.cu), so that none
// takes so long that all others would be done before it.
template <typename Element, int kDim>
cudaError_t launch_forward_mma_sync_dim(const AttentionParams& params, cudaStream_t stream);
template <typename Element, int kDim>
cudaError_t launch_backward_mma_sync_dim(const AttentionBackwardParams& params,
                                         cudaStream_t stream);

template <typename Element>
cudaError_t launch_forward_mma_sync(const AttentionParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    return launch_forward_mma_sync_dim<Element, dim.value>(params, stream);
  });
}
template <typename Element>
cudaError_t launch_backward_mma_sync(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    return launch_backward_mma_sync_dim<Element, dim.value>(params, stream);
  });
}

// 16-bit elements, head dims up to 128, with ranges of keys, unused keys, kv_bias or silu, without other biases.
template <typename Element, int kDim>
cudaError_t launch_backward_ranged_dim(const AttentionBackwardParams& params, cudaStream_t stream);

// Where an operand has no tensor map, on mma.sync.
template <typename Element>
cudaError_t launch_backward_ranged(const AttentionBackwardParams& params, cudaStream_t stream) {
  const cudaError_t error = dim_bucket(params) <= 64
                                ? launch_backward_ranged_dim<Element, 64>(params, stream)
                                : launch_backward_ranged_dim<Element, 128>(params, stream);
  if (error != cudaErrorNotSupported) return error;
  return launch_backward_mma_sync<Element>(params, stream);
}

// 16-bit elements, head dims of 33 on, sequences of more than long_rows(): first the plan in
// params.long_plan, or params.plans_itself where none is needed; then, behind it or another kernel
// behind it on the stream, the kernel.
template <typename Element>
cudaError_t launch_forward_plan(AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_forward_long(const AttentionParams& params, cudaStream_t stream);
// With ranges of keys, used parts of key sequences or silu, head dims up to 128 (attention/
// ranged_forward.cuh).
template <typename Element>
cudaError_t launch_forward_ranged(const AttentionParams& params, cudaStream_t stream);
// The same as launch_forward_long in the backward pass, with the workspaces beside long_plan. Without
// long_in_order dq differs from run to run by the order of its sums.
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

// The same for head dims of 65 to 256, sequences of up to kTinyWideRows; backward each head with keys
// of its own.
template <typename Element>
cudaError_t launch_forward_tiny_wide(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_tiny_wide(const AttentionBackwardParams& params, cudaStream_t stream);

// 16-bit elements, head dims up to 64, sequences of up to kShortRows that are not tiny, in the
// backward pass as many kv heads as heads: behind the kernel for tiny ones. cudaErrorNotSupported
// where an operand has no tensor map.
template <typename Element>
cudaError_t launch_forward_short(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_backward_short(const AttentionBackwardParams& params, cudaStream_t stream);

// The gradients of tables, of f32 and f64; launch_backward_mma_sync has those of 16-bit elements.
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

// The kernels that take whatever is_general() and silu, any element: forward. Where there is a plan
// (takes_ranged_forward) sequences of more than long_rows() have theirs, and the rows outside; the
// path is theirs, too. The kernel for the others runs behind it, on SMs that have nothing more to do.
template <typename Element>
cudaError_t launch_forward_general(AttentionParams params, cudaStream_t stream) {
  if constexpr (sizeof(Element) != 2) {
    return launch_forward_fma<Element>(params, stream);
  } else {
    if (params.long_plan == nullptr) return launch_forward_mma_sync<Element>(params, stream);
    params.planned = planned_lengths(params);
    const cudaError_t error = launch_forward_ranged<Element>(params, stream);
    if (error == cudaErrorNotSupported) params.long_plan = nullptr;
    if (error != cudaSuccess && error != cudaErrorNotSupported) return error;
    if (error == cudaSuccess && params.q_offsets.num_seqs == 0) return error;
    return launch_forward_mma_sync<Element>(params, stream);
  }
}

// The same in the backward pass, and where they are wanted the sums of tables behind it.
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
  if constexpr (!k16Bit) {
    if (error == cudaSuccess && params.table_ctas > 0)
      error = launch_table_gradients_fma<Element>(params, stream);
  }
  return error;
}

// Target attention, 16-bit elements.
template <typename Element>
cudaError_t launch_target_forward(const TargetAttentionParams& params, cudaStream_t stream);
template <typename Element>
cudaError_t launch_target_backward(const TargetAttentionBackwardParams& params,
                                   cudaStream_t stream);

}  // namespace jagged_cuda::attention
