// jagged_flash_attention on the CPU, forward and backward (cpu/attention.h,
// kernels/attention.inl).
#include "contract/jagged_flash_attention.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "cpu/attention.h"
#include "cpu/sequences.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

// What both directions share; sizes of windows are cut to what makes a difference.
AttentionParams make_params(const JaggedFlashAttentionSizes& sizes, const Tensor& q,
                            const Tensor& k, const Tensor& v, int64_t window_left,
                            int64_t window_right, double scale) {
  AttentionParams params{};
  params.element = element_of(q);
  params.q = rows_of(q);
  params.k = rows_of(k);
  params.v = rows_of(v);
  params.heads = sizes.heads;
  params.kv_heads = sizes.kv_heads;
  params.dim_qk = sizes.dim_qk;
  params.dim_v = sizes.dim_v;
  params.window_left = std::min(window_left, sizes.total_q + sizes.total_kv);
  params.window_right = std::min(window_right, sizes.total_q + sizes.total_kv);
  params.scale = scale;
  return params;
}

struct SequencePairs {
  std::vector<Sequence> q, kv;
};

SequencePairs read_pairs(const char* op, const Tensor& offsets,
                         const std::optional<Tensor>& kv_offsets,
                         const JaggedFlashAttentionSizes& sizes, std::optional<int64_t> max_len) {
  SequencePairs pairs;
  pairs.q = read_sequences(op, "offsets", offsets, sizes.total_q, max_len);
  pairs.kv =
      kv_offsets ? read_sequences(op, "kv_offsets", *kv_offsets, sizes.total_kv, max_len) : pairs.q;
  return pairs;
}

// -inf for the rows of lse [Tq, H] that lie outside all sequences.
template <class T>
void fill_lse_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t heads,
                      T* lse) {
  const int64_t begin = sequences.empty() ? total : sequences.front().begin;
  const int64_t end = sequences.empty() ? total : sequences.back().begin + sequences.back().len;
  std::fill(lse, lse + begin * heads, -std::numeric_limits<T>::infinity());
  std::fill(lse + end * heads, lse + total * heads, -std::numeric_limits<T>::infinity());
}

void fill_lse_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t heads,
                      const Tensor& lse) {
  if (lse.scalar_type() == ScalarType::Double) {
    fill_lse_outside(sequences, total, heads, lse.mutable_data_ptr<double>());
  } else {
    fill_lse_outside(sequences, total, heads, lse.mutable_data_ptr<float>());
  }
}

std::tuple<Tensor, Tensor> jagged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor offsets,
                                                  std::optional<Tensor> kv_offsets,
                                                  int64_t window_left, int64_t window_right,
                                                  double scale, std::optional<int64_t> max_len,
                                                  bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_flash_attention";
  const JaggedFlashAttentionSizes sizes = parse_jagged_flash_attention(
      op, q, k, v, offsets, kv_offsets, window_left, window_right, max_len);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len);
  q = rows_contiguous(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  Tensor out = allocate(op, q, {sizes.total_q, sizes.heads, sizes.dim_v});
  Tensor lse = allocate(op, q, {sizes.total_q, sizes.heads}, lse_dtype(q.scalar_type()));

  AttentionParams params = make_params(sizes, q, k, v, window_left, window_right, scale);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  zero_rows_outside(pairs.q, sizes.total_q,
                    sizes.heads * sizes.dim_v * element_bytes(params.element), params.out);
  fill_lse_outside(pairs.q, sizes.total_q, sizes.heads, lse);

  run_attention_forward(params, pairs.q, pairs.kv);
  record_kernel(kernel_table().name);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> jagged_flash_attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, Tensor offsets, std::optional<Tensor> kv_offsets, int64_t window_left,
    int64_t window_right, double scale, std::optional<int64_t> max_len, bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_flash_attention_backward";
  const JaggedFlashAttentionSizes sizes =
      parse_jagged_flash_attention_backward(grad_out, grad_lse, q, k, v, out, lse, offsets,
                                            kv_offsets, window_left, window_right, max_len);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len);
  q = rows_contiguous(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  out = rows_contiguous(op, out);
  grad_out = rows_contiguous(op, grad_out);
  lse = as_contiguous(op, lse);
  if (grad_lse) grad_lse = as_contiguous(op, *grad_lse);
  Tensor dq = allocate(op, q, {sizes.total_q, sizes.heads, sizes.dim_qk});
  Tensor dk = allocate(op, k, {sizes.total_kv, sizes.kv_heads, sizes.dim_qk});
  Tensor dv = allocate(op, v, {sizes.total_kv, sizes.kv_heads, sizes.dim_v});

  AttentionParams params = make_params(sizes, q, k, v, window_left, window_right, scale);
  params.out_rows = rows_of(out);
  params.grad_out = rows_of(grad_out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  params.dq = dq.mutable_data_ptr();
  params.dk = dk.mutable_data_ptr();
  params.dv = dv.mutable_data_ptr();
  const int64_t bytes_each = element_bytes(params.element);
  zero_rows_outside(pairs.q, sizes.total_q, sizes.heads * sizes.dim_qk * bytes_each, params.dq);
  zero_rows_outside(pairs.kv, sizes.total_kv, sizes.kv_heads * sizes.dim_qk * bytes_each,
                    params.dk);
  zero_rows_outside(pairs.kv, sizes.total_kv, sizes.kv_heads * sizes.dim_v * bytes_each, params.dv);

  run_attention_backward(params, pairs.q, pairs.kv);
  record_kernel(kernel_table().name);
  return {dq, dk, dv};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_flash_attention", TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention));
  m.impl("jagged_flash_attention_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention_backward));
}
