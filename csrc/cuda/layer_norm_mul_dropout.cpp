#include "contract/dropout.h"
#include "contract/probability.h"
#include "cuda/glue.h"
#include "cuda/kernels/layer_norm_mul_dropout.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// Operands that kernels take; each of these tensors must outlive the launch.
struct Operands {
  Tensor x, u, weight, bias;
  std::optional<Tensor> seed;
};

LayerNormMulDropoutParams params_of(const Operands& operands, double eps, double p) {
  const auto& [x, u, weight, bias, seed] = operands;
  const Dropout dropout = dropout_of(p);
  LayerNormMulDropoutParams params;
  params.x = x.const_data_ptr();
  params.u = u.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.bias = bias.const_data_ptr();
  params.seed = dropout.drops && seed ? seed->const_data_ptr<int64_t>() : nullptr;
  params.out = nullptr;
  params.total = x.size(0);
  params.columns = x.size(1);
  params.x_stride = x.stride(0);
  params.u_stride = u.stride(0);
  params.eps = eps;
  params.drop_up_to = dropout.drop_up_to;
  params.kept_scale = dropout.kept_scale;
  params.vectors = has_aligned_lines(x, {0}) && has_aligned_lines(u, {0}) &&
                   has_aligned_lines(weight, {}) && has_aligned_lines(bias, {});
  params.type = element_type(x.scalar_type());
  return params;
}

// x, u [T, D], weight, bias [D], seed [1] or None -> [T, D]
Tensor layer_norm_mul_dropout(const Tensor& x, const Tensor& u, const Tensor& weight,
                              const Tensor& bias, const std::optional<Tensor>& seed, double eps,
                              double p) {
  constexpr const char* op = "layer_norm_mul_dropout";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, u, weight, bias, seed, eps, p});
  check_probability(op, "p", p);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor out = allocate(op, x, {sizes.T, sizes.D});
  if (sizes.T == 0 || sizes.D == 0) return out;
  const Operands operands{as_contiguous(op, x, 1), as_contiguous(op, u, 1),
                          as_contiguous(op, weight), as_contiguous(op, bias), seed};
  LayerNormMulDropoutParams params = params_of(operands, eps, p);
  params.out = out.mutable_data_ptr();
  check_cuda(op, launch_layer_norm_mul_dropout(params, current_stream(x)));
  return out;
}

// grad_out, x, u [T, D], weight, bias [D], seed [1] or None -> two like x, two like weight
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_mul_dropout_backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& u, const Tensor& weight,
    const Tensor& bias, const std::optional<Tensor>& seed, double eps, double p) {
  constexpr const char* op = "layer_norm_mul_dropout_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, u, weight, bias, seed, eps, p});
  check_probability(op, "p", p);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor grad_x = allocate(op, x, {sizes.T, sizes.D});
  const Tensor grad_u = allocate(op, x, {sizes.T, sizes.D});
  const Tensor grad_weight = allocate(op, weight, {sizes.D});
  const Tensor grad_bias = allocate(op, bias, {sizes.D});
  if (sizes.D == 0) return {grad_x, grad_u, grad_weight, grad_bias};
  const Tensor grad = as_contiguous(op, grad_out, 1);
  const Operands operands{as_contiguous(op, x, 1), as_contiguous(op, u, 1),
                          as_contiguous(op, weight), as_contiguous(op, bias), seed};

  LayerNormMulDropoutBackwardParams params;
  params.forward = params_of(operands, eps, p);
  params.forward.vectors = params.forward.vectors && has_aligned_lines(grad, {0});
  params.grad_out = grad.const_data_ptr();
  params.grad_stride = grad.stride(0);
  params.grad_x = grad_x.mutable_data_ptr();
  params.grad_u = grad_u.mutable_data_ptr();
  params.grad_weight = grad_weight.mutable_data_ptr();
  params.grad_bias = grad_bias.mutable_data_ptr();
  check_cuda(op, layer_norm_workspace(params.forward, params.workspace));
  const ScalarType sums = weight.scalar_type();
  const Tensor partial = allocate(op, x, {params.workspace.num_partials, 2, sizes.D}, sums);
  std::optional<Tensor> statistics;
  if (params.workspace.needs_statistics) statistics = allocate(op, x, {sizes.T, 2}, sums);
  params.partial = partial.mutable_data_ptr();
  params.statistics = statistics ? statistics->mutable_data_ptr() : nullptr;
  check_cuda(op, launch_layer_norm_mul_dropout_backward(params, current_stream(x)));
  return {grad_x, grad_u, grad_weight, grad_bias};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("layer_norm_mul_dropout", TORCH_BOX(&layer_norm_mul_dropout));
  m.impl("layer_norm_mul_dropout_backward", TORCH_BOX(&layer_norm_mul_dropout_backward));
}

}  // namespace
}  // namespace jagged_cuda
