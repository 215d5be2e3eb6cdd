// layer_norm_mul_dropout on the CPU: items are up to kLayerNormRows rows (kernels/layer_norm.inl).
// Each leaves its sums for dweight and dbias, which are added in order.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"
#include "contract/probability.h"

namespace jagged_cuda::cpu {
namespace {

LayerNormParams layer_norm_params(const Tensor& x, const Tensor& u, const Tensor& weight,
                                  const Tensor& bias, const std::optional<Tensor>& seed, double eps,
                                  double p) {
  LayerNormParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.u = u.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.u_row_stride = u.stride(0);
  params.weight = weight.const_data_ptr();
  params.bias = bias.const_data_ptr();
  params.columns = x.size(1);
  params.eps = eps;
  params.dropout = dropout_of(p);
  params.dropout.drops = params.dropout.drops && seed.has_value();
  if (seed) params.seed = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
  return params;
}

WorkList<LayerNormItem> items_of(const LayerNormParams& params, int64_t total) {
  // Time to read and write an element, and to draw for it, in multiply-adds.
  constexpr int64_t kElementCost = 16;
  WorkList<LayerNormItem> items;
  for (int64_t row = 0; row < total; row += kLayerNormRows) {
    const int64_t rows = std::min(kLayerNormRows, total - row);
    items.add({row, rows}, rows * (params.columns + 4) * kElementCost);
  }
  return items;
}

Tensor layer_norm_mul_dropout(Tensor x, Tensor u, Tensor weight, Tensor bias,
                              std::optional<Tensor> seed, double eps, double p) {
  constexpr const char* op = "layer_norm_mul_dropout";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, u, weight, bias, seed, eps, p});
  check_probability(op, "p", p);
  x = as_contiguous(op, x, 1);
  u = as_contiguous(op, u, 1);
  weight = as_contiguous(op, weight);
  bias = as_contiguous(op, bias);
  Tensor out = allocate(op, x, {sizes.T, sizes.D});
  LayerNormParams params = layer_norm_params(x, u, weight, bias, seed, eps, p);
  params.out = out.mutable_data_ptr();
  const KernelTable& table = kernel_table();
  const auto run = table.of(params.element).layer_norm;
  if (sizes.D > 0) {
    items_of(params, sizes.T)
        .run(scratch_bytes<LayerNormBuffers>(params.element, params),
             [&](const LayerNormItem& item, void* scratch) { run(params, item, scratch); });
  }
  record_kernel(table.name);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_mul_dropout_backward(
    Tensor grad_out, Tensor x, Tensor u, Tensor weight, Tensor bias, std::optional<Tensor> seed,
    double eps, double p) {
  constexpr const char* op = "layer_norm_mul_dropout_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, u, weight, bias, seed, eps, p});
  check_probability(op, "p", p);
  grad_out = as_contiguous(op, grad_out, 1);
  x = as_contiguous(op, x, 1);
  u = as_contiguous(op, u, 1);
  weight = as_contiguous(op, weight);
  bias = as_contiguous(op, bias);
  Tensor grad_x = allocate(op, x, {sizes.T, sizes.D}), grad_u = allocate(op, x, {sizes.T, sizes.D});
  Tensor grad_weight = allocate(op, weight, {sizes.D}), grad_bias = allocate(op, bias, {sizes.D});
  LayerNormParams params = layer_norm_params(x, u, weight, bias, seed, eps, p);
  params.grad_out = grad_out.const_data_ptr();
  params.grad_row_stride = grad_out.stride(0);
  params.grad_x = grad_x.mutable_data_ptr();
  params.grad_u = grad_u.mutable_data_ptr();
  const KernelTable& table = kernel_table();
  const Kernels& kernels = table.of(params.element);
  if (sizes.D > 0) {
    const bool is_double = params.element == Element::kDouble;
    const int64_t sum_bytes = is_double ? 8 : 4;
    const Element sum_element = is_double ? Element::kDouble : Element::kFloat;
    // At least one part, so that without rows the sums are zeros.
    const int64_t parts = std::max<int64_t>(1, (sizes.T + kLayerNormRows - 1) / kLayerNormRows);
    const int64_t part_bytes = sizes.D * sum_bytes;
    const AlignedBuffer sums(static_cast<size_t>(2 * parts * part_bytes));
    char* weight_sums = static_cast<char*>(sums.data());
    char* bias_sums = weight_sums + parts * part_bytes;
    if (sizes.T == 0) std::memset(sums.data(), 0, static_cast<size_t>(2 * part_bytes));
    items_of(params, sizes.T)
        .run(scratch_bytes<LayerNormBuffers>(params.element, params),
             [&](const LayerNormItem& item, void* scratch) {
               const int64_t at = item.begin / kLayerNormRows * part_bytes;
               kernels.layer_norm_backward(params, item, weight_sums + at, bias_sums + at, scratch);
             });
    kernels.sum_parts(sum_element, grad_weight.mutable_data_ptr(), weight_sums, parts, sizes.D);
    kernels.sum_parts(sum_element, grad_bias.mutable_data_ptr(), bias_sums, parts, sizes.D);
  }
  record_kernel(table.name);
  return {grad_x, grad_u, grad_weight, grad_bias};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("layer_norm_mul_dropout", TORCH_BOX(&jagged_cuda::cpu::layer_norm_mul_dropout));
  m.impl("layer_norm_mul_dropout_backward",
         TORCH_BOX(&jagged_cuda::cpu::layer_norm_mul_dropout_backward));
}
