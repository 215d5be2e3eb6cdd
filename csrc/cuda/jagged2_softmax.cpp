#include "cuda/matrices.h"
#include "cuda/kernels/jagged2_softmax.h"

#include <torch/csrc/stable/library.h>

#include <limits>

namespace jagged_cuda {
namespace {

// How many rows the matrices' sides have is nowhere said: offsets are not bounded above.
constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// a [sum Lx*Ly], offsets [B + 1], y_offsets [B + 1] or none, matrix_offsets [B + 1] -> like a
Tensor jagged2_softmax(const Tensor& a, const Tensor& offsets,
                       const std::optional<Tensor>& y_offsets, const Tensor& matrix_offsets,
                       int64_t dim, double scale) {
  constexpr const char* op = "jagged2_softmax";
  static const Contract contract(op);
  const Sizes sizes = contract.check({a, offsets, y_offsets, matrix_offsets, dim, scale});
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  maybe_validate_matrices(op, "a", bounds, y_offsets.has_value(), kUnbounded, kUnbounded,
                          sizes.elems);
  const Tensor out = allocate(op, a, {sizes.elems});
  if (sizes.elems == 0) return out;
  const Tensor elems = as_contiguous(op, a);

  Jagged2SoftmaxParams params;
  params.a = elems.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.matrices = view_matrices(bounds, kUnbounded, kUnbounded, sizes.elems);
  params.over_rows = dim == -2;
  params.scale = scale;
  params.type = element_type(a.scalar_type());
  check_cuda(op, launch_jagged2_softmax(params, current_stream(a)));
  return out;
}

// grad_out and out [sum Lx*Ly], the same offsets -> grad_a, like out
Tensor jagged2_softmax_backward(const Tensor& grad_out, const Tensor& out, const Tensor& offsets,
                                const std::optional<Tensor>& y_offsets,
                                const Tensor& matrix_offsets, int64_t dim, double scale) {
  constexpr const char* op = "jagged2_softmax_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, out, offsets, y_offsets, matrix_offsets, dim, scale});
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  maybe_validate_matrices(op, "out", bounds, y_offsets.has_value(), kUnbounded, kUnbounded,
                          sizes.elems);
  const Tensor grad_a = allocate(op, out, {sizes.elems});
  if (sizes.elems == 0) return grad_a;
  const Tensor grad_elems = as_contiguous(op, grad_out), out_elems = as_contiguous(op, out);

  Jagged2SoftmaxBackwardParams params;
  params.grad_out = grad_elems.const_data_ptr();
  params.out = out_elems.const_data_ptr();
  params.grad_a = grad_a.mutable_data_ptr();
  params.matrices = view_matrices(bounds, kUnbounded, kUnbounded, sizes.elems);
  params.over_rows = dim == -2;
  params.scale = scale;
  params.type = element_type(out.scalar_type());
  check_cuda(op, launch_jagged2_softmax_backward(params, current_stream(out)));
  return grad_a;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged2_softmax", TORCH_BOX(&jagged2_softmax));
  m.impl("jagged2_softmax_backward", TORCH_BOX(&jagged2_softmax_backward));
}

}  // namespace
}  // namespace jagged_cuda
