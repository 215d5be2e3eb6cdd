// jagged_target_attention on the CPU, forward and backward: attention whose query sequences all
// have N rows (cpu/attention.h).
#include "contract/jagged_target_attention.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/attention.h"
#include "cpu/sequences.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// The one distance between rows of a [B, N, H, D] tensor, counted through all sequences, and 0 if
// there is none or the last dimension is not contiguous.
int64_t uniform_row_stride(const Tensor& tensor) {
  const int64_t num_seqs = tensor.size(0), num_queries = tensor.size(1);
  if (tensor.size(3) > 1 && tensor.stride(3) != 1) return 0;
  if (num_queries <= 1) return tensor.stride(0);
  const bool uniform = num_seqs <= 1 || tensor.stride(0) == num_queries * tensor.stride(1);
  return uniform ? tensor.stride(1) : 0;
}

// With rows at one distance; anything else goes through one copy.
Tensor with_uniform_rows(const char* op, const Tensor& tensor) {
  return uniform_row_stride(tensor) != 0 ? tensor : as_contiguous(op, tensor);
}

// A [B, N, H, D] tensor as rows [B * N, H, D].
Rows query_rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), uniform_row_stride(tensor), tensor.stride(2)};
}

Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

std::vector<Sequence> query_sequences(const JaggedTargetAttentionSizes& sizes) {
  std::vector<Sequence> queries(static_cast<size_t>(sizes.num_seqs));
  for (size_t seq = 0; seq < queries.size(); ++seq) {
    queries[seq] = {static_cast<int64_t>(seq) * sizes.num_queries, sizes.num_queries};
  }
  return queries;
}

AttentionParams make_params(const JaggedTargetAttentionSizes& sizes, const Tensor& q,
                            const Tensor& k, const Tensor& v, double scale) {
  AttentionParams params{};
  params.element = element_of(q);
  params.q = query_rows_of(q);
  params.k = rows_of(k);
  params.v = rows_of(v);
  params.heads = sizes.heads;
  params.kv_heads = sizes.kv_heads;
  params.dim_qk = sizes.dim_qk;
  params.dim_v = sizes.dim_v;
  params.window_left = params.window_right = -1;
  params.scale = scale;
  return params;
}

std::tuple<Tensor, Tensor> jagged_target_attention(Tensor q, Tensor k, Tensor v, Tensor offsets,
                                                   double scale, std::optional<int64_t> max_len,
                                                   bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_target_attention";
  const JaggedTargetAttentionSizes sizes =
      parse_jagged_target_attention(op, q, k, v, offsets, max_len);
  const auto keys = read_sequences(op, "offsets", offsets, sizes.total, max_len);
  q = with_uniform_rows(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  Tensor out = allocate(op, q, {sizes.num_seqs, sizes.num_queries, sizes.heads, sizes.dim_v});
  Tensor lse =
      allocate(op, q, {sizes.num_seqs, sizes.num_queries, sizes.heads}, lse_dtype(q.scalar_type()));
  AttentionParams params = make_params(sizes, q, k, v, scale);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  run_attention_forward(params, query_sequences(sizes), keys);
  record_kernel(kernel_table().name);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> jagged_target_attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, Tensor offsets, double scale, std::optional<int64_t> max_len, bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_target_attention_backward";
  const JaggedTargetAttentionSizes sizes = parse_jagged_target_attention_backward(
      grad_out, grad_lse, q, k, v, out, lse, offsets, max_len);
  const auto keys = read_sequences(op, "offsets", offsets, sizes.total, max_len);
  q = with_uniform_rows(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  out = with_uniform_rows(op, out);
  grad_out = with_uniform_rows(op, grad_out);
  lse = as_contiguous(op, lse);
  if (grad_lse) grad_lse = as_contiguous(op, *grad_lse);
  Tensor dq = allocate(op, q, {sizes.num_seqs, sizes.num_queries, sizes.heads, sizes.dim_qk});
  Tensor dk = allocate(op, k, {sizes.total, sizes.kv_heads, sizes.dim_qk});
  Tensor dv = allocate(op, v, {sizes.total, sizes.kv_heads, sizes.dim_v});
  AttentionParams params = make_params(sizes, q, k, v, scale);
  params.out_rows = query_rows_of(out);
  params.grad_out = query_rows_of(grad_out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  params.dq = dq.mutable_data_ptr();
  params.dk = dk.mutable_data_ptr();
  params.dv = dv.mutable_data_ptr();
  const int64_t bytes_each = element_bytes(params.element);
  zero_rows_outside(keys, sizes.total, sizes.kv_heads * sizes.dim_qk * bytes_each, params.dk);
  zero_rows_outside(keys, sizes.total, sizes.kv_heads * sizes.dim_v * bytes_each, params.dv);
  run_attention_backward(params, query_sequences(sizes), keys);
  record_kernel(kernel_table().name);
  return {dq, dk, dv};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_target_attention", TORCH_BOX(&jagged_cuda::cpu::jagged_target_attention));
  m.impl("jagged_target_attention_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_target_attention_backward));
}
