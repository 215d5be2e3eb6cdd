// jagged_flash_attention on the CPU, forward and backward (cpu/attention.h,
// kernels/attention.inl).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "cpu/attention.h"
#include "cpu/sequences.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

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

std::tuple<Tensor, Tensor> jagged_flash_attention(
    Tensor q, Tensor k, Tensor v, Tensor offsets, std::optional<Tensor> kv_offsets,
    int64_t window_left, int64_t window_right, double scale, std::optional<int64_t> max_len,
    bool allow_tf32, bool deterministic, std::optional<Tensor> key_ranges,
    const std::optional<Tensor>& kv_lengths, const std::optional<Tensor>& kv_bias,
    const std::optional<Tensor>& time_table, const std::optional<Tensor>& q_time,
    const std::optional<Tensor>& kv_time, const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first) {
  constexpr const char* op = "jagged_flash_attention";
  static const Contract contract(op);
  const Sizes sizes = contract.check(
      {q,          k,       v,          offsets,       kv_offsets, window_left,    window_right,
       scale,      max_len, allow_tf32, deterministic, key_ranges, kv_lengths,     kv_bias,
       time_table, q_time,  kv_time,    boundaries,    symmetric,  position_table, position_first});
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len, kv_lengths);
  q = as_contiguous(op, q, -1);
  k = as_contiguous(op, k, -1);
  v = as_contiguous(op, v, -1);
  if (key_ranges) key_ranges = as_contiguous(op, *key_ranges);
  Tensor out = allocate(op, q, {sizes.Tq, sizes.H, sizes.Dv});
  Tensor lse = allocate(op, q, {sizes.Tq, sizes.H}, sum_dtype(q.scalar_type()));

  AttentionParams params =
      flash_params(sizes, q, k, v, window_left, window_right, scale, key_ranges);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  params.bias = biases.view();
  zero_rows_outside(pairs.q, sizes.Tq, sizes.H * sizes.Dv * element_bytes(params.element),
                    params.out);
  fill_lse_outside(pairs.q, sizes.Tq, sizes.H, lse);

  run_attention_forward(params, pairs.q, pairs.kv);
  record_kernel(kernel_table().name);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> jagged_flash_attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, Tensor offsets, std::optional<Tensor> kv_offsets, int64_t window_left,
    int64_t window_right, double scale, std::optional<int64_t> max_len, bool allow_tf32,
    bool deterministic, std::optional<Tensor> key_ranges, const std::optional<Tensor>& kv_lengths,
    const std::optional<Tensor>& kv_bias, const std::optional<Tensor>& time_table,
    const std::optional<Tensor>& q_time, const std::optional<Tensor>& kv_time,
    const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first, bool kv_bias_gradient,
    bool table_gradients) {
  constexpr const char* op = "jagged_flash_attention_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out,
                                      grad_lse,
                                      q,
                                      k,
                                      v,
                                      out,
                                      lse,
                                      offsets,
                                      kv_offsets,
                                      window_left,
                                      window_right,
                                      scale,
                                      max_len,
                                      allow_tf32,
                                      deterministic,
                                      key_ranges,
                                      kv_lengths,
                                      kv_bias,
                                      time_table,
                                      q_time,
                                      kv_time,
                                      boundaries,
                                      symmetric,
                                      position_table,
                                      position_first,
                                      kv_bias_gradient,
                                      table_gradients});
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len, kv_lengths);
  q = as_contiguous(op, q, -1);
  k = as_contiguous(op, k, -1);
  v = as_contiguous(op, v, -1);
  if (key_ranges) key_ranges = as_contiguous(op, *key_ranges);
  out = as_contiguous(op, out, -1);
  grad_out = as_contiguous(op, grad_out, -1);
  lse = as_contiguous(op, lse);
  if (grad_lse) grad_lse = as_contiguous(op, *grad_lse);
  Tensor dq = allocate(op, q, {sizes.Tq, sizes.H, sizes.D});
  Tensor dk = allocate(op, k, {sizes.Tk, sizes.G, sizes.D});
  Tensor dv = allocate(op, v, {sizes.Tk, sizes.G, sizes.Dv});

  AttentionParams params =
      flash_params(sizes, q, k, v, window_left, window_right, scale, key_ranges);
  add_gradients(params, rows_of(out), rows_of(grad_out), lse, grad_lse, dq, dk, dv);
  params.bias = biases.view();
  BiasGradients added(op, q, sizes, biases);
  run_attention_backward(op, params, q, sizes, pairs, biases, kv_bias_gradient, table_gradients,
                         added);
  record_kernel(kernel_table().name);
  return {dq, dk, dv, added.kv_bias, added.time_table, added.position_table};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_flash_attention", TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention));
  m.impl("jagged_flash_attention_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention_backward));
}
