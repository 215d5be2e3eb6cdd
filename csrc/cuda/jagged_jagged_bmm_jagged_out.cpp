#include "cuda/matrix_products_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// x [Tx, D], y [Ty, D], offsets, y_offsets and matrix_offsets [B + 1] -> [total_out]
Tensor jagged_jagged_bmm_jagged_out(const Tensor& x, const Tensor& y, const Tensor& offsets,
                                    std::optional<Tensor> y_offsets, const Tensor& matrix_offsets,
                                    int64_t total_out, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_jagged_out";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({x, y, offsets, y_offsets, matrix_offsets, total_out, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  maybe_validate_matrices(op, "total_out", bounds, y_offsets.has_value(), sizes.Tx, sizes.Ty,
                          total_out);
  return times_rows(op, x, y, bounds, total_out, allow_tf32, current_stream(x));
}

// grad_out [sum Lx*Ly], x [Tx, D], y [Ty, D], offsets, y_offsets and matrix_offsets [B + 1] -> like x,
// like y
std::tuple<Tensor, Tensor> jagged_jagged_bmm_jagged_out_backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& y, const Tensor& offsets,
    std::optional<Tensor> y_offsets, const Tensor& matrix_offsets, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_jagged_out_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, x, y, offsets, y_offsets, matrix_offsets, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  maybe_validate_matrices(op, "grad_out", bounds, y_offsets.has_value(), sizes.Tx, sizes.Ty,
                          sizes.elems);
  const cudaStream_t stream = current_stream(x);
  const Tensor matrices = as_contiguous(op, grad_out), left = as_contiguous(op, x, -1),
               right = as_contiguous(op, y, -1);
  const Tensor grad_x =
      times_matrices(op, matrices, right, bounds, sizes.Tx, false, allow_tf32, stream);
  return {grad_x, times_matrices(op, matrices, left, bounds, sizes.Ty, true, allow_tf32, stream,
                                 grad_x.numel() > 0)};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_jagged_bmm_jagged_out", TORCH_BOX(&jagged_jagged_bmm_jagged_out));
  m.impl("jagged_jagged_bmm_jagged_out_backward",
         TORCH_BOX(&jagged_jagged_bmm_jagged_out_backward));
}

}  // namespace
}  // namespace jagged_cuda
