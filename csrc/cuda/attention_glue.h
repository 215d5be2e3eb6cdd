// What the CUDA entries of attention between jagged tensors share: their arguments as Params.
#pragma once

#include "cuda/glue.h"
#include "cuda/kernels/jagged_flash_attention.h"

#include <optional>

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

inline int64_t window_rows(int64_t window) {
  return window < 0 ? AttentionParams::kUnbounded : window;
}

// What the operators share: all but results, their gradients and the score function.
inline void fill_common(const char* op, AttentionParams& params, const Sizes& sizes,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                        const Tensor& kv_offsets, int64_t window_left, int64_t window_right,
                        double scale, std::optional<int64_t> max_len,
                        const std::optional<Tensor>& key_ranges) {
  params.type = element_type(q.scalar_type());
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
  params.max_len = max_len.value_or(0);
  params.mma_sync_only = mma_sync_only(op);
  params.aligned =
      has_aligned_lines(q, {0, 1}) && has_aligned_lines(k, {0, 1}) && has_aligned_lines(v, {0, 1});
}

inline void set_out(AttentionParams& params, const Tensor& out) {
  params.out = view_heads(out);
  params.aligned = params.aligned && has_aligned_lines(out, {0, 1});
}

inline void set_grad_out(AttentionBackwardParams& params, const Tensor& grad_out) {
  params.grad_out = view_heads(grad_out);
  params.aligned = params.aligned && has_aligned_lines(grad_out, {0, 1});
}

inline void validate(const char* op, const Sizes& sizes, const Tensor& offsets,
                     const std::optional<Tensor>& kv_offsets, std::optional<int64_t> max_len) {
  maybe_validate_offsets(op, "offsets", offsets, sizes.Tq, max_len);
  if (kv_offsets) {
    maybe_validate_offsets(op, "kv_offsets", *kv_offsets, sizes.Tk, max_len, /*is_first=*/false);
  }
}

}  // namespace jagged_cuda
