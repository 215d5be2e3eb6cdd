#include "cuda/glue.h"
#include "cuda/kernels/jagged_softmax.h"
#include "contract/jagged_softmax.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// Whether rows can be read and written as vectors of 4 elements (2 of f64).
bool has_vectors(const Tensor& rows) {
  const int64_t count = rows.scalar_type() == ScalarType::Double ? 2 : 4;
  return has_aligned_lines(rows, {0}, count * static_cast<int64_t>(rows.element_size()));
}

// Contiguous and uninitialised, like `x` of any number of dimensions.
Tensor allocate_like(const char* op, const Tensor& x, const JaggedSoftmaxSizes& sizes) {
  const Tensor flat = allocate(op, x, {sizes.total, sizes.columns});
  if (x.dim() == 2) return flat;
  std::vector<int64_t> shape(x.dim());
  for (int64_t dim = 0; dim < x.dim(); ++dim) shape[dim] = x.size(dim);
  return torch::stable::view(flat, shape);
}

// x [T, ...], offsets [B + 1] -> like x
Tensor jagged_softmax(const Tensor& x, const Tensor& offsets, double scale) {
  constexpr const char* op = "jagged_softmax";
  const JaggedSoftmaxSizes sizes = parse_jagged_softmax(x, offsets);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.total);
  const Tensor out = allocate_like(op, x, sizes);
  if (sizes.total == 0 || sizes.columns == 0) return out;
  const Tensor rows = softmax_rows(op, x);

  JaggedSoftmaxParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.total);
  params.columns = sizes.columns;
  params.x_stride = softmax_row_stride(rows, sizes.columns);
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
  const JaggedSoftmaxSizes sizes = parse_jagged_softmax_backward(grad_out, out, offsets);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.total);
  const Tensor grad_x = allocate_like(op, out, sizes);
  if (sizes.total == 0 || sizes.columns == 0) return grad_x;
  const Tensor grad_rows = softmax_rows(op, grad_out), out_rows = softmax_rows(op, out);

  JaggedSoftmaxBackwardParams params;
  params.grad_out = grad_rows.const_data_ptr();
  params.out = out_rows.const_data_ptr();
  params.grad_x = grad_x.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.total);
  params.columns = sizes.columns;
  params.grad_out_stride = softmax_row_stride(grad_rows, sizes.columns);
  params.out_stride = softmax_row_stride(out_rows, sizes.columns);
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
