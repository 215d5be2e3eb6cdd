#include "cuda/glue.h"
#include "cuda/kernels/jagged_softmax.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// Whether rows can be read and written as vectors of 4 elements (2 of f64).
bool has_vectors(const Tensor& rows) {
  const int64_t count = rows.scalar_type() == ScalarType::Double ? 2 : 4;
  return has_aligned_lines(rows, {0}, count * static_cast<int64_t>(rows.element_size()));
}

// x [T, ...], offsets [B + 1] -> like x
Tensor jagged_softmax(const Tensor& x, const Tensor& offsets, double scale) {
  constexpr const char* op = "jagged_softmax";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, scale});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, x.sizes());
  if (sizes.T == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1);

  JaggedSoftmaxParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.x_stride = rows.stride(0);
  params.scale = scale;
  params.vectors = has_vectors(rows);
  params.type = element_type(x.scalar_type());
  check_cuda(op, launch_jagged_softmax(params, current_stream(x)));
  return out;
}

// grad_out and out [T, ...], offsets [B + 1] -> grad_x, like out
Tensor jagged_softmax_backward(const Tensor& grad_out, const Tensor& out, const Tensor& offsets,
                               double scale) {
  constexpr const char* op = "jagged_softmax_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, out, offsets, scale});
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor grad_x = allocate(op, out, out.sizes());
  if (sizes.T == 0 || sizes.rest == 0) return grad_x;
  const Tensor grad_rows = as_contiguous(op, grad_out, 1), out_rows = as_contiguous(op, out, 1);

  JaggedSoftmaxBackwardParams params;
  params.grad_out = grad_rows.const_data_ptr();
  params.out = out_rows.const_data_ptr();
  params.grad_x = grad_x.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.grad_out_stride = grad_rows.stride(0);
  params.out_stride = out_rows.stride(0);
  params.scale = scale;
  params.vectors = has_vectors(grad_rows) && has_vectors(out_rows);
  params.type = element_type(out.scalar_type());
  check_cuda(op, launch_jagged_softmax_backward(params, current_stream(out)));
  return grad_x;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_softmax", TORCH_BOX(&jagged_softmax));
  m.impl("jagged_softmax_backward", TORCH_BOX(&jagged_softmax_backward));
}

}  // namespace
}  // namespace jagged_cuda
