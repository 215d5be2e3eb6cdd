// jagged_target_attention on the CPU, forward and backward: attention whose query sequences all
// have N rows (cpu/attention.h).
#include "contract/contract.h"

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

std::vector<Sequence> query_sequences(const Sizes& sizes) {
  std::vector<Sequence> queries(static_cast<size_t>(sizes.B));
  for (size_t seq = 0; seq < queries.size(); ++seq) {
    queries[seq] = {static_cast<int64_t>(seq) * sizes.N, sizes.N};
  }
  return queries;
}

std::tuple<Tensor, Tensor> jagged_target_attention(Tensor q, Tensor k, Tensor v, Tensor offsets,
                                                   double scale, std::optional<int64_t> max_len,
                                                   bool allow_tf32) {
  constexpr const char* op = "jagged_target_attention";
  static const Contract contract(op);
  const Sizes sizes = contract.check({q, k, v, offsets, scale, max_len, allow_tf32});
  const auto keys = read_sequences(op, "offsets", offsets, sizes.T, max_len);
  q = with_uniform_rows(op, q);
  k = as_contiguous(op, k, -1);
  v = as_contiguous(op, v, -1);
  Tensor out = allocate(op, q, {sizes.B, sizes.N, sizes.H, sizes.Dv});
  Tensor lse = allocate(op, q, {sizes.B, sizes.N, sizes.H}, sum_dtype(q.scalar_type()));
  AttentionParams params = attention_params(sizes, query_rows_of(q), k, v, scale);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  run_attention_forward(params, query_sequences(sizes), keys);
  record_kernel(kernel_table().name);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> jagged_target_attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, Tensor offsets, double scale, std::optional<int64_t> max_len, bool allow_tf32) {
  constexpr const char* op = "jagged_target_attention_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, grad_lse, q, k, v, out, lse, offsets, scale, max_len, allow_tf32});
  const auto keys = read_sequences(op, "offsets", offsets, sizes.T, max_len);
  q = with_uniform_rows(op, q);
  k = as_contiguous(op, k, -1);
  v = as_contiguous(op, v, -1);
  out = with_uniform_rows(op, out);
  grad_out = with_uniform_rows(op, grad_out);
  lse = as_contiguous(op, lse);
  if (grad_lse) grad_lse = as_contiguous(op, *grad_lse);
  Tensor dq = allocate(op, q, {sizes.B, sizes.N, sizes.H, sizes.D});
  Tensor dk = allocate(op, k, {sizes.T, sizes.G, sizes.D});
  Tensor dv = allocate(op, v, {sizes.T, sizes.G, sizes.Dv});
  AttentionParams params = attention_params(sizes, query_rows_of(q), k, v, scale);
  add_gradients(params, query_rows_of(out), query_rows_of(grad_out), lse, grad_lse, dq, dk, dv);
  const int64_t bytes_each = element_bytes(params.element);
  zero_rows_outside(keys, sizes.T, sizes.G * sizes.D * bytes_each, params.dk);
  zero_rows_outside(keys, sizes.T, sizes.G * sizes.Dv * bytes_each, params.dv);
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
