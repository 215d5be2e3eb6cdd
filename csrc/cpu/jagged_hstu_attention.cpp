// jagged_hstu_attention on the CPU, forward and backward (cpu/attention.h, kernels/attention.inl).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/attention.h"
#include "cpu/sequences.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

void add_silu(AttentionParams& params, double divisor, const std::optional<Tensor>& row_scale) {
  params.silu = true;
  params.divisor = divisor;
  params.row_scale = row_scale ? row_scale->const_data_ptr() : nullptr;
}

Tensor jagged_hstu_attention(
    Tensor q, Tensor k, Tensor v, Tensor offsets, std::optional<Tensor> kv_offsets,
    int64_t window_left, int64_t window_right, double scale, double divisor,
    std::optional<Tensor> row_scale, std::optional<Tensor> key_ranges,
    std::optional<int64_t> max_len, bool allow_tf32, const std::optional<Tensor>& kv_lengths,
    const std::optional<Tensor>& kv_bias, const std::optional<Tensor>& time_table,
    const std::optional<Tensor>& q_time, const std::optional<Tensor>& kv_time,
    const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first) {
  constexpr const char* op = "jagged_hstu_attention";
  static const Contract contract(op);
  const Sizes sizes = contract.check({q,
                                      k,
                                      v,
                                      offsets,
                                      kv_offsets,
                                      window_left,
                                      window_right,
                                      scale,
                                      divisor,
                                      row_scale,
                                      key_ranges,
                                      max_len,
                                      allow_tf32,
                                      kv_lengths,
                                      kv_bias,
                                      time_table,
                                      q_time,
                                      kv_time,
                                      boundaries,
                                      symmetric,
                                      position_table,
                                      position_first});
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len, kv_lengths);
  q = as_contiguous(op, q, -1);
  k = as_contiguous(op, k, -1);
  v = as_contiguous(op, v, -1);
  if (row_scale) row_scale = as_contiguous(op, *row_scale);
  if (key_ranges) key_ranges = as_contiguous(op, *key_ranges);
  Tensor out = allocate(op, q, {sizes.Tq, sizes.H, sizes.Dv});

  AttentionParams params =
      flash_params(sizes, q, k, v, window_left, window_right, scale, key_ranges);
  add_silu(params, divisor, row_scale);
  params.out = out.mutable_data_ptr();
  params.bias = biases.view();
  zero_rows_outside(pairs.q, sizes.Tq, sizes.H * sizes.Dv * element_bytes(params.element),
                    params.out);
  run_attention_forward(params, pairs.q, pairs.kv);
  record_kernel(kernel_table().name);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> jagged_hstu_attention_backward(
    Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor offsets, std::optional<Tensor> kv_offsets,
    int64_t window_left, int64_t window_right, double scale, double divisor,
    std::optional<Tensor> row_scale, std::optional<Tensor> key_ranges,
    std::optional<int64_t> max_len, bool allow_tf32, const std::optional<Tensor>& kv_lengths,
    const std::optional<Tensor>& kv_bias, const std::optional<Tensor>& time_table,
    const std::optional<Tensor>& q_time, const std::optional<Tensor>& kv_time,
    const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first, bool kv_bias_gradient,
    bool table_gradients) {
  constexpr const char* op = "jagged_hstu_attention_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out,
                                      q,
                                      k,
                                      v,
                                      offsets,
                                      kv_offsets,
                                      window_left,
                                      window_right,
                                      scale,
                                      divisor,
                                      row_scale,
                                      key_ranges,
                                      max_len,
                                      allow_tf32,
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
  grad_out = as_contiguous(op, grad_out, -1);
  if (row_scale) row_scale = as_contiguous(op, *row_scale);
  if (key_ranges) key_ranges = as_contiguous(op, *key_ranges);
  Tensor dq = allocate(op, q, {sizes.Tq, sizes.H, sizes.D});
  Tensor dk = allocate(op, k, {sizes.Tk, sizes.G, sizes.D});
  Tensor dv = allocate(op, v, {sizes.Tk, sizes.G, sizes.Dv});

  AttentionParams params =
      flash_params(sizes, q, k, v, window_left, window_right, scale, key_ranges);
  add_silu(params, divisor, row_scale);
  params.grad_out = rows_of(grad_out);
  params.dq = dq.mutable_data_ptr();
  params.dk = dk.mutable_data_ptr();
  params.dv = dv.mutable_data_ptr();
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
  m.impl("jagged_hstu_attention", TORCH_BOX(&jagged_cuda::cpu::jagged_hstu_attention));
  m.impl("jagged_hstu_attention_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_hstu_attention_backward));
}
