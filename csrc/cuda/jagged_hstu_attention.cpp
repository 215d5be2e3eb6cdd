// CUDA entry of jagged_hstu_attention: parse, fill Params, launch.

#include "cuda/kernels/jagged_hstu_attention.h"

#include "cuda/attention_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// A tensor as kernels take it, or none.
std::optional<Tensor> dense(const char* op, const std::optional<Tensor>& given) {
  return given ? std::optional<Tensor>(as_contiguous(op, *given)) : std::nullopt;
}

void set_silu(AttentionParams& params, double divisor, const std::optional<Tensor>& row_scale) {
  params.silu = true;
  params.divisor = divisor;
  params.row_scale = row_scale ? row_scale->const_data_ptr() : nullptr;
}

Tensor jagged_hstu_attention(
    const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Tensor& offsets_any,
    const std::optional<Tensor>& kv_offsets_any, int64_t window_left, int64_t window_right,
    double scale, double divisor, const std::optional<Tensor>& row_scale_any,
    const std::optional<Tensor>& key_ranges_any, std::optional<int64_t> max_len, bool allow_tf32,
    const std::optional<Tensor>& kv_lengths, const std::optional<Tensor>& kv_bias,
    const std::optional<Tensor>& time_table, const std::optional<Tensor>& q_time,
    const std::optional<Tensor>& kv_time, const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first) {
  constexpr const char* op = "jagged_hstu_attention";
  static const Contract contract(op);
  const Sizes sizes = contract.check(
      {q_any,        k_any,      v_any,          offsets_any,   kv_offsets_any, window_left,
       window_right, scale,      divisor,        row_scale_any, key_ranges_any, max_len,
       allow_tf32,   kv_lengths, kv_bias,        time_table,    q_time,         kv_time,
       boundaries,   symmetric,  position_table, position_first});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const Tensor given_q = as_contiguous(op, q_any, -1), given_k = as_contiguous(op, k_any, -1),
               given_v = as_contiguous(op, v_any, -1);
  const Tensor offsets = as_contiguous(op, offsets_any),
               kv_offsets = key_offsets(op, sizes, offsets, kv_offsets_any);
  const auto row_scale = dense(op, row_scale_any), key_ranges = aligned_ranges(op, key_ranges_any);
  validate(op, sizes, offsets, kv_offsets_any, max_len);
  Tensor given_out = allocate(op, given_q, {sizes.Tq, sizes.H, sizes.Dv});
  if (sizes.Tq == 0 || sizes.H == 0) return given_out;

  PaddedHeads padded(op, {&given_q, &given_k, &given_v, &given_out});
  const Tensor q = padded.operand(given_q), k = padded.operand(given_k),
               v = padded.operand(given_v), out = padded.result(given_out);

  AttentionParams params{};
  fill_common(op, params, padded.sizes(sizes), q, k, v, offsets, kv_offsets, window_left,
              window_right, scale, max_len, allow_tf32, key_ranges, biases);
  set_out(params, out);
  set_silu(params, divisor, row_scale);
  Tensor long_plan;
  if (takes_ranged_forward(params)) long_plan = allocate_long_plan(op, params, q);
  const cudaStream_t stream = current_stream(q);
  padded.copy_in(stream);
  check_cuda(op, launch_jagged_hstu_attention(params, stream));
  padded.copy_out(stream);
  return given_out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> jagged_hstu_attention_backward(
    const Tensor& grad_out_any, const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
    const Tensor& offsets_any, const std::optional<Tensor>& kv_offsets_any, int64_t window_left,
    int64_t window_right, double scale, double divisor, const std::optional<Tensor>& row_scale_any,
    const std::optional<Tensor>& key_ranges_any, std::optional<int64_t> max_len, bool allow_tf32,
    const std::optional<Tensor>& kv_lengths, const std::optional<Tensor>& kv_bias,
    const std::optional<Tensor>& time_table, const std::optional<Tensor>& q_time,
    const std::optional<Tensor>& kv_time, const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first, bool kv_bias_gradient,
    bool table_gradients) {
  constexpr const char* op = "jagged_hstu_attention_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check(
      {grad_out_any,   q_any,        k_any,      v_any,          offsets_any,    kv_offsets_any,
       window_left,    window_right, scale,      divisor,        row_scale_any,  key_ranges_any,
       max_len,        allow_tf32,   kv_lengths, kv_bias,        time_table,     q_time,
       kv_time,        boundaries,   symmetric,  position_table, position_first, kv_bias_gradient,
       table_gradients});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const Tensor given_q = as_contiguous(op, q_any, -1), given_k = as_contiguous(op, k_any, -1),
               given_v = as_contiguous(op, v_any, -1),
               given_grad_out = as_contiguous(op, grad_out_any, -1);
  const Tensor offsets = as_contiguous(op, offsets_any),
               kv_offsets = key_offsets(op, sizes, offsets, kv_offsets_any);
  const auto row_scale = dense(op, row_scale_any), key_ranges = aligned_ranges(op, key_ranges_any);
  validate(op, sizes, offsets, kv_offsets_any, max_len);
  Tensor grad_q = allocate(op, given_q, {sizes.Tq, sizes.H, sizes.D});
  Tensor grad_k = allocate(op, given_q, {sizes.Tk, sizes.G, sizes.D});
  Tensor grad_v = allocate(op, given_q, {sizes.Tk, sizes.G, sizes.Dv});
  const Tensor weights =
      allocate(op, given_q, {sizes.Tq, sizes.H}, sum_dtype(given_q.scalar_type()));
  PaddedHeads padded(op, {&given_q, &given_k, &given_v, &given_grad_out});
  const Tensor q = padded.operand(given_q), k = padded.operand(given_k),
               v = padded.operand(given_v), grad_out = padded.operand(given_grad_out);
  AttentionBackwardParams params{};
  fill_common(op, params, padded.sizes(sizes), q, k, v, offsets, kv_offsets, window_left,
              window_right, scale, max_len, allow_tf32, key_ranges, biases);
  BiasSums sums(op, params, q, sizes, biases, kv_bias_gradient, table_gradients);
  const auto& [grad_kv_bias, grad_time_table, grad_position_table] = sums.gradients;
  if (sizes.H == 0) {
    torch::stable::zero_(grad_k);
    torch::stable::zero_(grad_v);
  }
  if (sizes.H == 0 || (sizes.Tq == 0 && sizes.Tk == 0))
    return {grad_q, grad_k, grad_v, grad_kv_bias, grad_time_table, grad_position_table};
  set_silu(params, divisor, row_scale);
  set_grad_out(params, grad_out);
  params.delta = weights.mutable_data_ptr();
  params.grad_q = view_heads(padded.result(grad_q));
  params.grad_k = view_heads(padded.result(grad_k));
  params.grad_v = view_heads(padded.result(grad_v));
  const auto tile_bounds = allocate_tile_bounds(op, params, q);
  const cudaStream_t stream = current_stream(q);
  padded.copy_in(stream);
  check_cuda(op, launch_jagged_hstu_attention_backward(params, stream));
  padded.copy_out(stream);
  sums.finish(params, sizes, stream);
  return {grad_q, grad_k, grad_v, grad_kv_bias, grad_time_table, grad_position_table};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_hstu_attention", TORCH_BOX(&jagged_hstu_attention));
  m.impl("jagged_hstu_attention_backward", TORCH_BOX(&jagged_hstu_attention_backward));
}

}  // namespace
}  // namespace jagged_cuda
