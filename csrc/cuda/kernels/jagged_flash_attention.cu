// Which kernels jagged_flash_attention takes: wgmma or mma.sync for 16-bit elements and in TF32, mma.sync
// for f32 in full precision, but plain FMA for f32 with ranges of keys and the like, and for f64.
#include "cuda/kernels/jagged_flash_attention.h"

#include "cuda/kernels/attention/few_forward.h"
#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/attention/starting_times.h"
#include "cuda/kernels/attention/tf32.h"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"

#include <atomic>

namespace jagged_cuda {
namespace {

bool copyable(const HeadsView& view, int64_t rows, int64_t heads) {
  return (rows <= 1 || view.row_stride > 0) && (heads <= 1 || view.head_stride > 0);
}

// Whether the wgmma kernels take these operands: rows that can be copied in 16-byte pieces, are not
// expanded, and can be counted in 32 bits, and a GPU that has the instruction.
bool takes_wgmma(const AttentionParams& params) {
  return params.aligned && !params.mma_sync_only &&
         copyable(params.q, params.q_offsets.total, params.heads) &&
         copyable(params.k, params.kv_offsets.total, params.kv_heads) &&
         copyable(params.v, params.kv_offsets.total, params.kv_heads) &&
         params.q_offsets.total < kMaxRows32 && params.kv_offsets.total < kMaxRows32 && has_wgmma();
}

// The same in the backward pass, where the kernels for head dims of 65 to 128 copy grad_out, too.
bool takes_wgmma_backward(const AttentionBackwardParams& params) {
  return takes_wgmma(params) && (attention::dim_bucket(params) != 128 ||
                                 copyable(params.grad_out, params.q_offsets.total, params.heads));
}

// Whether the kernels for tiny sequences take these operands: head dims of at most 256, rows that can
// be moved in 16-byte pieces, and items, rows and bytes of strides that can be counted in 32 bits.
// `grad_out` is a fourth operand, or `out` in the forward pass.
bool takes_tiny(const AttentionParams& params, const HeadsView& grad_out) {
  constexpr int64_t kMaxCount = int64_t{1} << 30;
  const auto narrow = [](const HeadsView& view, int64_t heads) {
    return view.row_stride < kMaxCount && heads * view.head_stride < kMaxCount;
  };
  return attention::dim_bucket(params) != 0 && params.aligned &&
         params.q_offsets.total < kMaxRows32 && params.kv_offsets.total < kMaxRows32 &&
         params.q_offsets.num_seqs * params.heads < kMaxCount && narrow(params.q, params.heads) &&
         narrow(params.k, params.kv_heads) && narrow(params.v, params.kv_heads) &&
         narrow(grad_out, params.heads);
}

// Whether the kernels for long sequences take these operands, which the wgmma kernels take.
template <typename Params>
bool takes_long(const Params& params) {
  return attention::dim_bucket(params) >= 64 && params.q_offsets.total > long_rows(params) &&
         (params.max_len == 0 || is_long(params, params.max_len, params.max_len));
}

// Whether the kernels for tiny sequences are those of which a warp holds fewer rows.
bool has_wide_rows(const AttentionParams& params) { return tiny_limit(params) < kTinyRows; }

// Whether no sequence can be longer than tiny, by the caller's word or by the size of the tensors.
bool all_tiny(const AttentionParams& params) {
  const int64_t limit = tiny_limit(params);
  return (params.max_len > 0 && params.max_len <= limit) ||
         (params.q_offsets.total <= limit && params.kv_offsets.total <= limit);
}

// Whether a backward pass has so few tiles that launches and the latency of one warp are all there is:
// then the kernels for longer sequences, which finish sooner, take all. (Gradients depend on T / B
// anyhow, by the size of steps; the forward pass must not.)
bool has_few_tiles(const AttentionParams& params) {
  constexpr int64_t kFewTiles = 264;
  return num_tiles(params.q_offsets.total, params.q_offsets.num_seqs, 64) * params.heads <=
         kFewTiles;
}

// Whether a forward pass has so few tiles and heads of sequences that one kernel may hold the CTAs of
// two, and whether there is such a kernel.
bool takes_few(const AttentionParams& params) {
  const int bucket = attention::dim_bucket(params);
  const int64_t seqs = params.q_offsets.num_seqs, total = params.q_offsets.total,
                most = bucket == 64   ? 1056
                       : bucket == 32 ? 396
                                      : 264;
  // Short sequences alone: those of many keys for few queries have a kernel of their own.
  const bool is_taken = bucket == 32 || bucket == 128 ||
                        (bucket == 64 && params.q_offsets.data == params.kv_offsets.data);
  const int64_t tiles = attention::looks_in_slabs(params)
                            ? num_longer_tiles(total, tiny_limit(params))
                            : num_tiles(total, seqs, 64);
  return is_taken && takes_wgmma(params) && !all_tiny(params) &&
         (tiles + seqs * (tiny_limit(params) / 16) / (bucket == 64 ? 4 : 5) + 1) * params.heads <=
             most;
}

// Whether the kernel for short sequences takes these operands, which the wgmma kernels take, too.
bool takes_short(const AttentionParams& params) {
  return params.split_by_length && attention::dim_bucket(params) == 64;
}

// The same in the backward pass, where that kernel sums nothing over the heads of a group.
bool takes_short_backward(const AttentionBackwardParams& params) {
  return takes_short(params) && params.heads == params.kv_heads &&
         copyable(params.grad_out, params.q_offsets.total, params.heads);
}

// Whether no sequence can be longer than short.
bool all_short(const AttentionParams& params) {
  return (params.max_len > 0 && params.max_len <= kShortRows) ||
         (params.q_offsets.total <= kShortRows && params.kv_offsets.total <= kShortRows);
}

// Whether the kernels that multiply f32 on tensor cores take these operands.
bool takes_tf32(const AttentionParams& params) {
  return (params.type == ElementType::kTf32 || params.type == ElementType::kF32) &&
         !is_general(params);
}

// Launches the kernel for longer sequences behind that for tiny ones, where the latter takes the
// operands, and not at all where no sequence can be longer. A sequence's own length decides which
// of the two takes it, so its bits do not depend on the batch. The path is that of the last.
template <typename Params, typename Launch>
cudaError_t launch_by_length(Params params, bool has_tiny, cudaStream_t stream,
                             Launch launch_longer,
                             cudaError_t (*launch_tiny)(const Params&, cudaStream_t)) {
  if (!has_tiny) return launch_longer(params);
  // Who does not look in slabs need not know.
  if (params.q_offsets.data != params.kv_offsets.data ||
      params.q_offsets.total >= params.q_offsets.num_seqs * kShortRows) {
    params.longer = nullptr;
  }
  static std::atomic<int> calls{0};
  params.call_number = calls.fetch_add(1, std::memory_order_relaxed);
  const cudaError_t error = launch_tiny(params, stream);
  if (error != cudaSuccess || all_tiny(params)) return error;
  params.split_by_length = true;
  // Where sequences are short on average, most tiles would be those of tiny ones.
  params.longer_in_slabs =
      params.q_offsets.data == params.kv_offsets.data &&
      params.q_offsets.total < params.q_offsets.num_seqs *
                                   (has_wide_rows(params) ? kTinyWideRows / 2 : kTinyRows * 5 / 8);
  return launch_longer(params);
}

// The forward kernels on wgmma, each for sequences of its own lengths. Wide heads have but one.
template <typename Element>
cudaError_t launch_on_wgmma(AttentionParams params, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (!is_wide(params)) {
    if (takes_short(params)) {
      error = attention::launch_forward_short<Element>(params, stream);
      if (error != cudaSuccess || all_short(params)) return error;
      params.short_apart = true;
    }
    // In self-attention nothing lies between short and long sequences.
    const bool any_between = !params.short_apart || params.long_plan == nullptr ||
                             params.q_offsets.data != params.kv_offsets.data;
    if (any_between) error = attention::launch_forward_wgmma<Element>(params, stream);
    params.plan_is_there = any_between;
  }
  const bool any_long = params.long_plan != nullptr && !params.long_first;
  return error == cudaSuccess && any_long ? attention::launch_forward_long<Element>(params, stream)
                                          : error;
}

// The forward kernels in TF32: that for long sequences, where there is a plan, behind that for others.
cudaError_t launch_tf32(AttentionParams params, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (params.long_plan != nullptr) {
    error = attention::launch_forward_plan<float>(params, stream);
    params.long_first = false;
    if (error == cudaSuccess) error = attention::launch_forward_tf32<false>(params, stream);
    if (error == cudaSuccess) error = attention::launch_forward_long<float>(params, stream);
    if (error != cudaErrorNotSupported) return error;
    params.long_plan = nullptr;
  }
  return attention::launch_forward_tf32<false>(params, stream);
}

}  // namespace

bool takes_ranged_forward(const AttentionParams& params) {
  // Biases are divided by the scale, in f32 (attention/starting_bias.cuh).
  constexpr double kLeastScale = 1e-9, kMostScale = 1e9;
  const double scale = params.scale < 0 ? -params.scale : params.scale;
  const ScoreBias& bias = params.bias;
  if (bias.time_table != nullptr && (bias.kv_bias != nullptr || bias.position_table != nullptr ||
                                     bias.time_buckets > attention::kMostForwardTimeBuckets))
    return false;
  return is_16_bit(params.type) && !is_wide(params) && takes_wgmma(params) && takes_long(params) &&
         (!params.bias.any() || (scale >= kLeastScale && scale <= kMostScale));
}

bool takes_tf32_long(const AttentionParams& params) {
  return params.type == ElementType::kTf32 && !is_general(params) && !is_wide(params) &&
         takes_wgmma(params) && takes_long(params);
}

bool takes_long_backward(const AttentionBackwardParams& params) {
  return is_16_bit(params.type) && !is_general(params) && takes_wgmma(params) &&
         takes_long(params) && copyable(params.grad_out, params.q_offsets.total, params.heads);
}

bool takes_ranged_backward(const AttentionBackwardParams& params) {
  return is_16_bit(params.type) && (params.silu || is_general(params)) && !is_wide(params) &&
         takes_wgmma(params) && copyable(params.grad_out, params.q_offsets.total, params.heads);
}

cudaError_t launch_jagged_flash_attention(const AttentionParams& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) != 2) {
      if (!takes_tf32(params)) return attention::launch_forward_fma<Element>(params, stream);
      if (params.type == ElementType::kTf32) return launch_tf32(params, stream);
      return attention::launch_forward_tf32<true>(params, stream);
    } else {
      if (is_general(params)) return attention::launch_forward_general<Element>(params, stream);
      const auto launch_longer = [&](const AttentionParams& longer) {
        if (takes_wgmma(longer) && (!is_wide(longer) || longer.long_plan != nullptr)) {
          const cudaError_t error = launch_on_wgmma<Element>(longer, stream);
          if (error != cudaErrorNotSupported) return error;
        }
        AttentionParams all = longer;
        all.long_plan = nullptr;
        return attention::launch_forward_mma_sync<Element>(all, stream);
      };
      const bool has_tiny = takes_tiny(params, params.out);
      AttentionParams planned = params;
      planned.split_by_length = has_tiny;
      if (!takes_wgmma(params) || !takes_long(params) || (has_tiny && all_tiny(params)))
        planned.long_plan = nullptr;
      if (planned.long_plan != nullptr) {
        cudaError_t error = attention::launch_forward_plan<Element>(planned, stream);
        if (error == cudaSuccess && planned.long_first)
          error = attention::launch_forward_long<Element>(planned, stream);
        if (error == cudaErrorNotSupported) {
          planned.long_plan = nullptr;
          planned.long_first = false;
        } else if (error != cudaSuccess) {
          return error;
        }
      }
      if (has_tiny && takes_few(params)) {
        cudaError_t error = attention::launch_forward_few<Element>(planned, stream);
        if (error == cudaSuccess && planned.long_plan != nullptr && !planned.long_first)
          error = attention::launch_forward_long<Element>(planned, stream);
        if (error != cudaErrorNotSupported) return error;
      }
      planned.plan_is_there = is_wide(params) && has_tiny;  // nothing comes between
      return launch_by_length(planned, has_tiny, stream, launch_longer,
                              has_wide_rows(params) ? attention::launch_forward_tiny_wide<Element>
                                                    : attention::launch_forward_tiny<Element>);
    }
  });
}

cudaError_t launch_jagged_flash_attention_backward(const AttentionBackwardParams& given,
                                                   cudaStream_t stream) {
  AttentionBackwardParams params = given;
  params.planned = planned_lengths(params);
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) != 2) {
      if (takes_tf32(params)) {
        return params.type == ElementType::kTf32
                   ? attention::launch_backward_tf32<false>(params, stream)
                   : attention::launch_backward_tf32<true>(params, stream);
      }
      return attention::launch_backward_general<Element>(params, stream);
    } else {
      if (is_general(params)) return attention::launch_backward_general<Element>(params, stream);
      const auto launch_longer = [&](AttentionBackwardParams longer) {
        if (is_wide(longer) && longer.long_plan != nullptr) {
          const cudaError_t error = attention::launch_backward_wide<Element>(longer, stream);
          if (error != cudaErrorNotSupported) return error;
        }
        if (is_wide(longer) || !takes_wgmma_backward(longer))
          return attention::launch_backward_mma_sync<Element>(longer, stream);
        cudaError_t error = cudaSuccess;
        if (takes_short_backward(longer)) {
          error = attention::launch_backward_short<Element>(longer, stream);
          if (error == cudaSuccess && all_short(longer)) return error;
          if (error != cudaSuccess && error != cudaErrorNotSupported) return error;
          longer.short_apart = error == cudaSuccess;
          // Few are longer where sequences are short on average: most tiles would be of others.
          if (longer.short_apart && longer.q_offsets.data == longer.kv_offsets.data &&
              longer.q_offsets.total < longer.q_offsets.num_seqs * kShortRows)
            longer.longer_in_slabs = true;
        }
        if (longer.long_plan != nullptr) {
          error = attention::launch_backward_long<Element>(longer, stream);
          if (error != cudaErrorNotSupported) return error;
          longer.long_plan = nullptr;
        }
        error = attention::launch_backward_wgmma<Element>(longer, attention::BackwardPart::kAll,
                                                          stream);
        return error == cudaErrorNotSupported
                   ? attention::launch_backward_mma_sync<Element>(longer, stream)
                   : error;
      };
      const bool wide_rows = has_wide_rows(params), grouped = params.heads != params.kv_heads;
      // Few rows are of tiny sequences where these are wide and sequences long on average.
      const bool few_tiny =
          has_few_tiles(params) ||
          (wide_rows && params.q_offsets.total >= params.q_offsets.num_seqs * (4 * kTinyWideRows));
      const bool has_tiny = takes_tiny(params, params.grad_out) && !(wide_rows && grouped) &&
                            (all_tiny(params) || !few_tiny || !takes_wgmma(params));
      return launch_by_length(params, has_tiny, stream, launch_longer,
                              wide_rows ? attention::launch_backward_tiny_wide<Element>
                                        : attention::launch_backward_tiny<Element>);
    }
  });
}

}  // namespace jagged_cuda
