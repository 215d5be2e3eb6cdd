// jagged_flash_attention: out_b = softmax(scale Q_b K_b^T + mask) V_b, for each sequence b and
// head.
//
// Row i of sequence b sees key j iff i + Lk - Lq - left <= j <= i + Lk - Lq + right (bottom-right
// alignment; -1 is unbounded).
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

struct JaggedFlashAttentionSizes {
  int64_t total_q;   // Tq
  int64_t total_kv;  // Tk
  int64_t num_seqs;  // B
  int64_t heads;     // H: query heads
  int64_t kv_heads;  // G: key/value heads, H % G == 0
  int64_t dim_qk;    // D: head dim of q and k, 1 to 256
  int64_t dim_v;     // Dv: head dim of v, 1 to 256
};

// The dtype of LSE, and of sums inside the kernels.
inline ScalarType lse_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// q [Tq, H, D], k [Tk, G, D], v [Tk, G, Dv], offsets [B + 1], kv_offsets [B + 1] or none (=
// offsets)
inline JaggedFlashAttentionSizes parse_jagged_flash_attention(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
    const std::optional<Tensor>& kv_offsets, int64_t window_left, int64_t window_right,
    std::optional<int64_t> max_len) {
  check_dim(op, "q", q, 3, "[Tq, H, D]");
  check_dim(op, "k", k, 3, "[Tk, G, D]");
  check_dim(op, "v", v, 3, "[Tk, G, Dv]");
  check_floating(op, "q", q);
  check_like(op, "k", k, q);
  check_like(op, "v", v, q);
  check_offsets(op, "offsets", offsets, q);
  const JaggedFlashAttentionSizes sizes{
      q.size(0), k.size(0), offsets.size(0) - 1, q.size(1), k.size(1), q.size(2), v.size(2)};
  check_shape(op, "k", k, {sizes.total_kv, sizes.kv_heads, sizes.dim_qk});
  check_shape(op, "v", v, {sizes.total_kv, sizes.kv_heads, sizes.dim_v});
  if (kv_offsets) {
    check_offsets(op, "kv_offsets", *kv_offsets, q);
    check_dtype(op, "kv_offsets", *kv_offsets, offsets.scalar_type());
    check_shape(op, "kv_offsets", *kv_offsets, {sizes.num_seqs + 1});
  } else if (sizes.total_kv != sizes.total_q) {
    fail_argument(op, "k",
                  shape_text({sizes.total_q, sizes.kv_heads, sizes.dim_qk}) +
                      " (the rows of q, as kv_offsets is None)",
                  shape_text(k));
  }
  if (sizes.dim_qk < 1 || sizes.dim_qk > 256) {
    fail_argument(op, "q", "[Tq, H, D] with D from 1 to 256", shape_text(q));
  }
  if (sizes.dim_v < 1 || sizes.dim_v > 256) {
    fail_argument(op, "v", "[Tk, G, Dv] with Dv from 1 to 256", shape_text(v));
  }
  if (sizes.kv_heads < 1 ? sizes.heads > 0 : sizes.heads % sizes.kv_heads != 0) {
    fail_argument(
        op, "q",
        "[Tq, H, D] with H a multiple of the " + std::to_string(sizes.kv_heads) + " heads of k",
        shape_text(q));
  }
  if (window_left < -1) {
    fail_argument(op, "window_size[0]", ">= -1", std::to_string(window_left));
  }
  if (window_right < -1) {
    fail_argument(op, "window_size[1]", ">= -1", std::to_string(window_right));
  }
  if (max_len && *max_len < 0) fail_argument(op, "max_len", ">= 0", std::to_string(*max_len));
  return sizes;
}

// grad_out like out [Tq, H, Dv], grad_lse like lse [Tq, H] or none
inline JaggedFlashAttentionSizes parse_jagged_flash_attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& offsets,
    const std::optional<Tensor>& kv_offsets, int64_t window_left, int64_t window_right,
    std::optional<int64_t> max_len) {
  constexpr const char* op = "jagged_flash_attention_backward";
  const JaggedFlashAttentionSizes sizes = parse_jagged_flash_attention(
      op, q, k, v, offsets, kv_offsets, window_left, window_right, max_len);
  check_shape(op, "out", out, {sizes.total_q, sizes.heads, sizes.dim_v});
  check_like(op, "out", out, q);
  check_shape(op, "grad_out", grad_out, {sizes.total_q, sizes.heads, sizes.dim_v});
  check_like(op, "grad_out", grad_out, q);
  check_shape(op, "lse", lse, {sizes.total_q, sizes.heads});
  check_dtype(op, "lse", lse, lse_dtype(q.scalar_type()));
  check_device(op, "lse", lse, q);
  if (grad_lse) {
    check_shape(op, "grad_lse", *grad_lse, {sizes.total_q, sizes.heads});
    check_dtype(op, "grad_lse", *grad_lse, lse_dtype(q.scalar_type()));
    check_device(op, "grad_lse", *grad_lse, q);
  }
  return sizes;
}

}  // namespace jagged_cuda
