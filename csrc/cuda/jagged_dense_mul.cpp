#include "cuda/combine_glue.h"
#include "cuda/kernels/jagged_dense_mul.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], y [B, M, ...], offsets [B + 1] -> [T, ...]
Tensor jagged_dense_mul(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_mul";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  return combine_with_dense(op, x, y, offsets, sizes, [&](const auto& params, auto stream) {
    return launch_jagged_dense_mul(params, element_type(x.scalar_type()), stream);
  });
}

// grad_out, x [T, ...], offsets [B + 1] -> [B, max_len, ...]
Tensor padded_product(const char* op, const Tensor& grad_out, const Tensor& x,
                      const Tensor& offsets, int64_t max_len, const Sizes& sizes) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor grad_y = allocate(op, x, with_rows_of(x, 1, {sizes.B, max_len}));
  if (sizes.B == 0 || max_len == 0 || sizes.rest == 0) return grad_y;
  const Tensor grad_rows = as_contiguous(op, grad_out, 1), rows = as_contiguous(op, x, 1);

  PaddedProductParams params;
  params.grad_out = grad_rows.const_data_ptr();
  params.x = rows.const_data_ptr();
  params.grad_y = grad_y.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.grad_stride = grad_rows.stride(0);
  params.x_stride = rows.stride(0);
  params.max_len = max_len;
  params.vectors = has_aligned_lines(grad_rows, {0}) && has_aligned_lines(rows, {0});
  params.type = element_type(x.scalar_type());
  check_cuda(op, launch_padded_product(params, current_stream(x)));
  return grad_y;
}

// grad_out, x [T, ...], offsets [B + 1], y [B, max_len, ...] -> [B, max_len, ...], [rows, ...]
std::tuple<Tensor, Tensor> jagged_dense_mul_backward(const Tensor& grad_out, const Tensor& x,
                                                     const Tensor& offsets, int64_t max_len,
                                                     const std::optional<Tensor>& y, int64_t rows) {
  constexpr const char* op = "jagged_dense_mul_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, offsets, max_len, y, rows});
  if (!wants_both_gradients(op, rows, sizes, max_len, y.has_value())) {
    return {padded_product(op, grad_out, x, offsets, max_len, sizes),
            allocate(op, x, with_rows_of(x, 1, {0}))};
  }
  const auto [grad_x, grad_y] = combine_backward(op, grad_out, x, y, offsets, max_len, sizes,
                                                 launch_jagged_dense_mul_backward);
  return {grad_y, grad_x};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_mul", TORCH_BOX(&jagged_dense_mul));
  m.impl("jagged_dense_mul_backward", TORCH_BOX(&jagged_dense_mul_backward));
}

}  // namespace
}  // namespace jagged_cuda
