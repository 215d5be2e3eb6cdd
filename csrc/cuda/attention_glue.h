// What the CUDA entries of attention between jagged tensors share: their arguments as Params.
#pragma once

#include "contract/biases.h"
#include "cuda/glue.h"
#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/attention/padded_heads.h"
#include "cuda/kernels/attention/time_tiles.h"
#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/hopper.h"

#include <optional>
#include <vector>

namespace jagged_cuda {

// Contiguous, and at an address that a range can be read from at once.
inline std::optional<Tensor> aligned_ranges(const char* op, const std::optional<Tensor>& given) {
  if (!given) return std::nullopt;
  const Tensor ranges = as_contiguous(op, *given);
  const auto address = reinterpret_cast<uintptr_t>(ranges.const_data_ptr());
  if (address % alignof(KeyInterval) == 0) return ranges;
  const Tensor copy = allocate(op, ranges, ranges.sizes());
  torch::stable::copy_(const_cast<Tensor&>(copy), ranges);
  return copy;
}

// kv_offsets, or offsets without any. Kernels take equal pointers for equal rows, so where q and k
// have different numbers of rows it is never the tensor of offsets itself.
inline Tensor key_offsets(const char* op, const Sizes& sizes, const Tensor& offsets,
                          const std::optional<Tensor>& given) {
  if (!given) return offsets;
  Tensor found = as_contiguous(op, *given);
  if (sizes.Tq == sizes.Tk || found.const_data_ptr() != offsets.const_data_ptr()) return found;
  Tensor copy = allocate(op, found, {found.size(0)}, found.scalar_type());
  torch::stable::copy_(copy, found);
  return copy;
}

inline int64_t window_rows(int64_t window) {
  return window < 0 ? AttentionParams::kUnbounded : window;
}

// What the operators share: all but results, their gradients and the score function.
inline void fill_common(const char* op, AttentionParams& params, const Sizes& sizes,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                        const Tensor& kv_offsets, int64_t window_left, int64_t window_right,
                        double scale, std::optional<int64_t> max_len, bool allow_tf32,
                        const std::optional<Tensor>& key_ranges, const Biases& biases) {
  params.type = element_type(q.scalar_type(), allow_tf32);
  params.q_offsets = view_offsets(offsets, sizes.Tq);
  params.kv_offsets = view_offsets(kv_offsets, sizes.Tk);
  params.q = view_heads(q);
  params.k = view_heads(k);
  params.v = view_heads(v);
  params.heads = static_cast<int>(sizes.H);
  params.kv_heads = static_cast<int>(sizes.G);
  params.dim_qk = static_cast<int>(sizes.D);
  params.dim_v = static_cast<int>(sizes.Dv);
  params.window_left = window_rows(window_left);
  params.window_right = window_rows(window_right);
  params.scale = scale;
  params.key_ranges =
      key_ranges ? static_cast<const KeyInterval*>(key_ranges->const_data_ptr()) : nullptr;
  params.num_key_ranges = static_cast<int>(sizes.R);
  if (biases.kv_lengths) {
    maybe_validate_counts(op, "kv_lengths", *biases.kv_lengths);
    params.kv_lengths = view_counts(biases.kv_lengths, 0);
  }
  params.bias = biases.view();
  params.max_len = max_len.value_or(0);
  params.mma_sync_only = mma_sync_only(op);
  params.aligned =
      has_aligned_lines(q, {0, 1}) && has_aligned_lines(k, {0, 1}) && has_aligned_lines(v, {0, 1});
}

// Where the wgmma kernels would take operands but for their rows, which are no whole vectors of 16
// bytes (head dims of 25 and 50, odd offsets): copies with zeros behind the columns, which change no
// result. A row's own tensors alone decide, so a sequence's bits do not depend on the batch.
class PaddedHeads {
 public:
  // `heads`: all operands, [rows, heads, dim] with a contiguous last dimension.
  PaddedHeads(const char* op, std::initializer_list<const Tensor*> heads) : op_(op) {
    for (const Tensor* each : heads)
      wanted_ = wanted_ || (each->numel() > 0 && !has_aligned_lines(*each, {0, 1}));
    const Tensor& first = **heads.begin();
    wanted_ = wanted_ && first.element_size() == 2 && !mma_sync_only(op) && has_wgmma();
    for (const Tensor* each : heads) wanted_ = wanted_ && each->size(2) <= kMaxDim;
  }

  // What kernels take for head dims.
  Sizes sizes(Sizes given) const {
    if (wanted_) {
      given.D = attention::padded_dim(given.D);
      given.Dv = attention::padded_dim(given.Dv);
    }
    return given;
  }
  // What they take for an operand: itself, or a copy, which copy_in() makes.
  Tensor operand(const Tensor& heads) {
    if (!wanted_ || has_aligned_lines(heads, {0, 1})) return heads;
    const Tensor copy = padded(heads);
    in_.add(copy_of(heads, copy));
    return copy;
  }
  // What they take for a result: itself, or what copy_out() copies to it.
  Tensor result(const Tensor& heads) {
    if (!wanted_ || has_aligned_lines(heads, {0, 1})) return heads;
    Tensor wide = padded(heads);
    out_.add(copy_of(wide, heads));
    kept_.push_back(wide);
    return wide;
  }
  void copy_in(cudaStream_t stream) const {
    check_cuda(op_, attention::launch_copy_heads(in_, stream));
  }
  void copy_out(cudaStream_t stream) const {
    check_cuda(op_, attention::launch_copy_heads(out_, stream));
  }

 private:
  static constexpr int64_t kMaxDim = 256;

  Tensor padded(const Tensor& heads) const {
    return allocate(op_, heads,
                    {heads.size(0), heads.size(1), attention::padded_dim(heads.size(2))});
  }
  static attention::HeadsCopy copy_of(const Tensor& from, const Tensor& to) {
    const HeadsView view = view_heads(from);
    return {view.data,
            const_cast<void*>(to.const_data_ptr()),
            from.size(0),
            from.size(1),
            view.row_stride,
            view.head_stride,
            static_cast<int>(from.size(2)),
            static_cast<int>(to.size(2))};
  }

  const char* op_;
  bool wanted_ = false;
  attention::HeadsCopies in_{}, out_{};
  std::vector<Tensor> kept_;
};

inline void set_out(AttentionParams& params, const Tensor& out) {
  params.out = view_heads(out);
  params.aligned = params.aligned && has_aligned_lines(out, {0, 1});
}

inline Tensor allocate_long_plan(const char* op, AttentionParams& params, const Tensor& like,
                                 int plans = 1) {
  constexpr int64_t kWordBytes = 4;
  const int64_t words = plans * long_plan_bytes(params.q_offsets.num_seqs) / kWordBytes;
  Tensor plan = allocate(op, like, {words + AttentionParams::kLongerWords}, ScalarType::Int);
  params.long_plan = plan.mutable_data_ptr();
  params.longer = plan.mutable_data_ptr<int>() + words;
  return plan;
}

inline void set_grad_out(AttentionBackwardParams& params, const Tensor& grad_out) {
  params.grad_out = view_heads(grad_out);
  params.aligned = params.aligned && has_aligned_lines(grad_out, {0, 1});
}

// The workspace of the kernels that takes_ranged_backward() speaks of; params are complete but for it.
inline std::optional<Tensor> allocate_tile_bounds(const char* op, AttentionBackwardParams& params,
                                                  const Tensor& like) {
  if (!takes_ranged_backward(params)) return std::nullopt;
  constexpr int64_t kWordBytes = 4;
  const int64_t bytes = tile_bounds_bytes(params.q_offsets.total, params.q_offsets.num_seqs) +
                        position_tiles_bytes(params.bias) + time_tiles_bytes(params);
  Tensor bounds = allocate(op, like, {bytes / kWordBytes}, ScalarType::Int);
  params.tile_bounds = bounds.mutable_data_ptr();
  return bounds;
}

// The gradients of biases that are wanted: the kernels of the backward pass leave sums in workspaces,
// which finish() adds up behind them.
class BiasSums {
 public:
  BiasSums(const char* op, AttentionBackwardParams& params, const Tensor& like, const Sizes& sizes,
           const Biases& biases, bool kv_bias_gradient, bool table_gradients)
      : op_(op), gradients(op, like, sizes, biases) {
    const auto made = [&](std::optional<Tensor>& sums, Shape shape, bool zero) {
      sums = allocate(op, like, shape, sum_dtype(like.scalar_type()));
      if (zero) torch::stable::zero_(*sums);
      return sums->mutable_data_ptr();
    };
    if (kv_bias_gradient && biases.kv_bias)
      params.key_sums = made(key_sums_, {sizes.Tk, sizes.H}, true);
    if (!table_gradients || !params.bias.has_tables()) return;
    const bool each_warp = !is_16_bit(params.type);  // adds to what is there; else CTAs write
    params.table_ctas = static_cast<int>(table_ctas(params));
    parts_ = params.table_ctas * table_parts(params.type);
    if (biases.time_table)
      params.time_sums = made(time_sums_, {parts_, sizes.H, sizes.Rt + 1}, each_warp);
    if (biases.position_table)
      params.position_sums = made(position_sums_, {parts_, sizes.H, sizes.Rp}, each_warp);
  }

  void finish(const AttentionBackwardParams& params, const Sizes& sizes, cudaStream_t stream) {
    const auto add_up = [&](const std::optional<Tensor>& sums, Tensor& out, int64_t parts,
                            int64_t outer, int64_t heads, int64_t inner) {
      if (!sums) return;
      check_cuda(op_, attention::launch_bias_sums(
                          {params.type, sums->const_data_ptr(), out.mutable_data_ptr(), parts,
                           outer, params.heads, static_cast<int>(heads), inner},
                          stream));
    };
    add_up(key_sums_, gradients.kv_bias, 1, sizes.Tk, sizes.Hb, 1);
    add_up(time_sums_, gradients.time_table, parts_, 1, sizes.Ht, sizes.Rt + 1);
    add_up(position_sums_, gradients.position_table, parts_, 1, sizes.Hp, sizes.Rp);
  }

 private:
  const char* op_;
  std::optional<Tensor> key_sums_, time_sums_, position_sums_;
  int64_t parts_ = 0;

 public:
  BiasGradients gradients;
};

inline void validate(const char* op, const Sizes& sizes, const Tensor& offsets,
                     const std::optional<Tensor>& kv_offsets, std::optional<int64_t> max_len) {
  maybe_validate_offsets(op, "offsets", offsets, sizes.Tq, max_len);
  if (kv_offsets) {
    maybe_validate_offsets(op, "kv_offsets", *kv_offsets, sizes.Tk, max_len, /*is_first=*/false);
  }
}

}  // namespace jagged_cuda
