// CUDA entry of jagged_flash_attention: parse, fill Params, launch.

#include "cuda/kernels/jagged_flash_attention.h"

#include "cuda/attention_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

std::tuple<Tensor, Tensor> jagged_flash_attention(
    const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Tensor& offsets_any,
    const std::optional<Tensor>& kv_offsets_any, int64_t window_left, int64_t window_right,
    double scale, std::optional<int64_t> max_len, bool allow_tf32, bool deterministic,
    const std::optional<Tensor>& key_ranges_any, const std::optional<Tensor>& kv_lengths,
    const std::optional<Tensor>& kv_bias, const std::optional<Tensor>& time_table,
    const std::optional<Tensor>& q_time, const std::optional<Tensor>& kv_time,
    const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first) {
  constexpr const char* op = "jagged_flash_attention";
  static const Contract contract(op);
  const Sizes sizes = contract.check(
      {q_any,        k_any,          v_any,         offsets_any, kv_offsets_any, window_left,
       window_right, scale,          max_len,       allow_tf32,  deterministic,  key_ranges_any,
       kv_lengths,   kv_bias,        time_table,    q_time,      kv_time,        boundaries,
       symmetric,    position_table, position_first});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const Tensor given_q = as_contiguous(op, q_any, -1), given_k = as_contiguous(op, k_any, -1),
               given_v = as_contiguous(op, v_any, -1);
  const Tensor offsets = as_contiguous(op, offsets_any),
               kv_offsets = key_offsets(op, sizes, offsets, kv_offsets_any);
  const std::optional<Tensor> key_ranges = aligned_ranges(op, key_ranges_any);
  validate(op, sizes, offsets, kv_offsets_any, max_len);
  Tensor given_out = allocate(op, given_q, {sizes.Tq, sizes.H, sizes.Dv});
  Tensor lse = allocate(op, given_q, {sizes.Tq, sizes.H}, sum_dtype(given_q.scalar_type()));
  if (sizes.Tq == 0 || sizes.H == 0) return {given_out, lse};

  PaddedHeads padded(op, {&given_q, &given_k, &given_v, &given_out});
  const Tensor q = padded.operand(given_q), k = padded.operand(given_k),
               v = padded.operand(given_v), out = padded.result(given_out);

  AttentionParams params{};
  fill_common(op, params, padded.sizes(sizes), q, k, v, offsets, kv_offsets, window_left,
              window_right, scale, max_len, allow_tf32, key_ranges, biases);
  set_out(params, out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  if (is_16_bit(params.type)) params.packed_shift = packing_shift(params);
  Tensor long_plan;
  const bool wants_plan = is_general(params)       ? takes_ranged_forward(params)
                          : is_16_bit(params.type) ? sizes.Tq > long_rows(params) && params.aligned
                                                   : takes_tf32_long(params);
  if (wants_plan) long_plan = allocate_long_plan(op, params, q);
  const cudaStream_t stream = current_stream(q);
  padded.copy_in(stream);
  check_cuda(op, launch_jagged_flash_attention(params, stream));
  padded.copy_out(stream);
  return {given_out, lse};
}

// A gradient whose rows or heads were expanded, as that of a sum over heads, becomes contiguous in 16 bits:
// the fastest kernels copy rows by TMA, which has no stride of 0.
Tensor with_own_rows(const char* op, const Tensor& grad) {
  const bool is_expanded =
      (grad.size(0) > 1 && grad.stride(0) == 0) || (grad.size(1) > 1 && grad.stride(1) == 0);
  return is_expanded && grad.element_size() == 2 ? as_contiguous(op, grad) : grad;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> jagged_flash_attention_backward(
    const Tensor& grad_out_any, const std::optional<Tensor>& grad_lse_any, const Tensor& q_any,
    const Tensor& k_any, const Tensor& v_any, const Tensor& out_any, const Tensor& lse_any,
    const Tensor& offsets_any, const std::optional<Tensor>& kv_offsets_any, int64_t window_left,
    int64_t window_right, double scale, std::optional<int64_t> max_len, bool allow_tf32,
    bool deterministic, const std::optional<Tensor>& key_ranges_any,
    const std::optional<Tensor>& kv_lengths, const std::optional<Tensor>& kv_bias,
    const std::optional<Tensor>& time_table, const std::optional<Tensor>& q_time,
    const std::optional<Tensor>& kv_time, const std::optional<Tensor>& boundaries, bool symmetric,
    const std::optional<Tensor>& position_table, int64_t position_first, bool kv_bias_gradient,
    bool table_gradients) {
  constexpr const char* op = "jagged_flash_attention_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out_any,     grad_lse_any,   q_any,       k_any,          v_any,
                      out_any,          lse_any,        offsets_any, kv_offsets_any, window_left,
                      window_right,     scale,          max_len,     allow_tf32,     deterministic,
                      key_ranges_any,   kv_lengths,     kv_bias,     time_table,     q_time,
                      kv_time,          boundaries,     symmetric,   position_table, position_first,
                      kv_bias_gradient, table_gradients});
  const torch::stable::accelerator::DeviceGuard guard(q_any.get_device_index());
  const Biases biases(op, kv_lengths, kv_bias, time_table, q_time, kv_time, boundaries, symmetric,
                      position_table, position_first);
  const Tensor given_q = as_contiguous(op, q_any, -1), given_k = as_contiguous(op, k_any, -1),
               given_v = as_contiguous(op, v_any, -1),
               given_grad_out = with_own_rows(op, as_contiguous(op, grad_out_any, -1)),
               given_out = as_contiguous(op, out_any, -1), lse = as_contiguous(op, lse_any);
  const std::optional<Tensor> grad_lse =
      grad_lse_any ? std::optional<Tensor>(as_contiguous(op, *grad_lse_any)) : std::nullopt;
  const Tensor offsets = as_contiguous(op, offsets_any),
               kv_offsets = key_offsets(op, sizes, offsets, kv_offsets_any);
  const std::optional<Tensor> key_ranges = aligned_ranges(op, key_ranges_any);
  validate(op, sizes, offsets, kv_offsets_any, max_len);
  Tensor grad_q = allocate(op, given_q, {sizes.Tq, sizes.H, sizes.D});
  Tensor grad_k = allocate(op, given_q, {sizes.Tk, sizes.G, sizes.D});
  Tensor grad_v = allocate(op, given_q, {sizes.Tk, sizes.G, sizes.Dv});
  const int64_t statistics = sizes.Tq * sizes.H;
  const Tensor delta =
      allocate(op, given_q,
               {statistics + AttentionParams::kLongerWords + AttentionBackwardParams::kItemCounts},
               sum_dtype(given_q.scalar_type()));
  PaddedHeads padded(op, {&given_q, &given_k, &given_v, &given_out, &given_grad_out});
  const Tensor q = padded.operand(given_q), k = padded.operand(given_k),
               v = padded.operand(given_v), out = padded.operand(given_out),
               grad_out = padded.operand(given_grad_out);
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
  set_out(params, out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  set_grad_out(params, grad_out);
  params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  params.delta = delta.mutable_data_ptr();
  if (is_16_bit(params.type)) {
    params.longer = static_cast<int*>(params.delta) + statistics;
    params.next_item = params.longer + AttentionParams::kLongerWords;
  }
  params.grad_q = view_heads(padded.result(grad_q));
  params.grad_k = view_heads(padded.result(grad_k));
  params.grad_v = view_heads(padded.result(grad_v));
  params.long_in_order = deterministic || adds_in_order(params);
  Tensor long_plan, long_statistics, long_grad_q, tickets;
  if (is_wide(params)) {
    if (takes_long_backward(params)) long_plan = allocate_long_plan(op, params, q, /*plans=*/2);
  } else if (takes_long_backward(params)) {
    long_plan = allocate_long_plan(op, params, q);
    long_statistics = allocate(op, q, {long_statistics_floats(params)}, ScalarType::Float);
    long_grad_q = allocate(op, q, {long_grad_q_floats(params)}, ScalarType::Float);
    if (deterministic || first_tile_may_store(params)) {
      tickets = allocate(op, q, {num_long_tickets(params)}, ScalarType::Int);
      params.long_tickets = tickets.mutable_data_ptr<int>();
    }
    params.long_statistics = long_statistics.mutable_data_ptr<float>();
    params.long_grad_q = long_grad_q.mutable_data_ptr<float>();
  }
  const auto tile_bounds = allocate_tile_bounds(op, params, q);
  const cudaStream_t stream = current_stream(q);
  padded.copy_in(stream);
  check_cuda(op, launch_jagged_flash_attention_backward(params, stream));
  padded.copy_out(stream);
  sums.finish(params, sizes, stream);
  return {grad_q, grad_k, grad_v, grad_kv_bias, grad_time_table, grad_position_table};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_flash_attention", TORCH_BOX(&jagged_flash_attention));
  m.impl("jagged_flash_attention_backward", TORCH_BOX(&jagged_flash_attention_backward));
}

}  // namespace
}  // namespace jagged_cuda
