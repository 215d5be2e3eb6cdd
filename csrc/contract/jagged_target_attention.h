// jagged_target_attention: out_b = softmax(scale Q_b K_b^T) V_b, for each sequence b and head, with
// N dense queries a sequence.
#pragma once

#include "contract/contract.h"
#include "contract/jagged_flash_attention.h"

namespace jagged_cuda {

struct JaggedTargetAttentionSizes {
  int64_t num_seqs;     // B
  int64_t num_queries;  // N: queries of each sequence
  int64_t total;        // T: rows of k and v
  int64_t heads;        // H: query heads
  int64_t kv_heads;     // G: key/value heads, H % G == 0
  int64_t dim_qk;       // D: head dim of q and k, 1 to 256
  int64_t dim_v;        // Dv: head dim of v, 1 to 256
};

// q [B, N, H, D], k [T, G, D], v [T, G, Dv], offsets [B + 1]
inline JaggedTargetAttentionSizes parse_jagged_target_attention(const char* op, const Tensor& q,
                                                                const Tensor& k, const Tensor& v,
                                                                const Tensor& offsets,
                                                                std::optional<int64_t> max_len) {
  check_dim(op, "q", q, 4, "[B, N, H, D]");
  check_dim(op, "k", k, 3, "[T, G, D]");
  check_dim(op, "v", v, 3, "[T, G, Dv]");
  check_floating(op, "q", q);
  check_like(op, "k", k, q);
  check_like(op, "v", v, q);
  check_offsets(op, "offsets", offsets, q);
  const JaggedTargetAttentionSizes sizes{offsets.size(0) - 1, q.size(1), k.size(0), q.size(2),
                                         k.size(1),           q.size(3), v.size(2)};
  check_shape(op, "q", q, {sizes.num_seqs, sizes.num_queries, sizes.heads, sizes.dim_qk});
  check_shape(op, "k", k, {sizes.total, sizes.kv_heads, sizes.dim_qk});
  check_shape(op, "v", v, {sizes.total, sizes.kv_heads, sizes.dim_v});
  if (sizes.dim_qk < 1 || sizes.dim_qk > 256) {
    fail_argument(op, "q", "[B, N, H, D] with D from 1 to 256", shape_text(q));
  }
  if (sizes.dim_v < 1 || sizes.dim_v > 256) {
    fail_argument(op, "v", "[T, G, Dv] with Dv from 1 to 256", shape_text(v));
  }
  if (sizes.kv_heads < 1 ? sizes.heads > 0 : sizes.heads % sizes.kv_heads != 0) {
    fail_argument(
        op, "q",
        "[B, N, H, D] with H a multiple of the " + std::to_string(sizes.kv_heads) + " heads of k",
        shape_text(q));
  }
  if (max_len && *max_len < 0) fail_argument(op, "max_len", ">= 0", std::to_string(*max_len));
  return sizes;
}

// grad_out like out [B, N, H, Dv], grad_lse like lse [B, N, H] or none
inline JaggedTargetAttentionSizes parse_jagged_target_attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& offsets,
    std::optional<int64_t> max_len) {
  constexpr const char* op = "jagged_target_attention_backward";
  const JaggedTargetAttentionSizes sizes =
      parse_jagged_target_attention(op, q, k, v, offsets, max_len);
  check_shape(op, "out", out, {sizes.num_seqs, sizes.num_queries, sizes.heads, sizes.dim_v});
  check_like(op, "out", out, q);
  check_shape(op, "grad_out", grad_out,
              {sizes.num_seqs, sizes.num_queries, sizes.heads, sizes.dim_v});
  check_like(op, "grad_out", grad_out, q);
  check_shape(op, "lse", lse, {sizes.num_seqs, sizes.num_queries, sizes.heads});
  check_dtype(op, "lse", lse, lse_dtype(q.scalar_type()));
  check_device(op, "lse", lse, q);
  if (grad_lse) {
    check_shape(op, "grad_lse", *grad_lse, {sizes.num_seqs, sizes.num_queries, sizes.heads});
    check_dtype(op, "grad_lse", *grad_lse, lse_dtype(q.scalar_type()));
    check_device(op, "grad_lse", *grad_lse, q);
  }
  return sizes;
}

}  // namespace jagged_cuda
