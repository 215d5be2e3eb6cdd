#include "cuda/matrix_products_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// a [sum Lx*Ly], y [Ty, N], or [Tx, N] if `transpose`, offsets, y_offsets and matrix_offsets
// [B + 1] -> [total, N]
Tensor array_jagged_bmm_jagged_out(const Tensor& a, const Tensor& y, const Tensor& offsets,
                                   std::optional<Tensor> y_offsets, const Tensor& matrix_offsets,
                                   int64_t total, bool transpose, bool allow_tf32) {
  constexpr const char* op = "array_jagged_bmm_jagged_out";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({a, y, offsets, y_offsets, matrix_offsets, total, transpose, allow_tf32});
  const int64_t total_rows = transpose ? sizes.T : total;
  const int64_t total_columns = transpose ? total : sizes.T;
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  maybe_validate_matrices(op, "a", bounds, y_offsets.has_value(), total_rows, total_columns,
                          sizes.elems);
  return times_matrices(op, a, y, bounds, total, transpose, allow_tf32, current_stream(a));
}

// grad_out [Tx, N], a [sum Lx*Ly], y [Ty, N], or with Tx and Ty exchanged if `transpose`, offsets,
// y_offsets and matrix_offsets [B + 1] -> like a, like y
std::tuple<Tensor, Tensor> array_jagged_bmm_jagged_out_backward(const Tensor& grad_out,
                                                                const Tensor& a, const Tensor& y,
                                                                const Tensor& offsets,
                                                                std::optional<Tensor> y_offsets,
                                                                const Tensor& matrix_offsets,
                                                                bool transpose, bool allow_tf32) {
  constexpr const char* op = "array_jagged_bmm_jagged_out_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, a, y, offsets, y_offsets, matrix_offsets, transpose, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const MatrixOffsets bounds = contiguous_offsets(op, offsets, y_offsets, matrix_offsets);
  const Tensor matrices = as_contiguous(op, a), grad = as_contiguous(op, grad_out, -1),
               factor = as_contiguous(op, y, -1);
  // The tensors whose sequences are the matrices' rows and columns.
  const Tensor &rows = transpose ? factor : grad, &columns = transpose ? grad : factor;
  maybe_validate_matrices(op, "a", bounds, y_offsets.has_value(), rows.size(0), columns.size(0),
                          sizes.elems);
  const cudaStream_t stream = current_stream(a);
  const Tensor grad_a = times_rows(op, rows, columns, bounds, sizes.elems, allow_tf32, stream);
  return {grad_a, times_matrices(op, matrices, grad, bounds, sizes.Ty, !transpose, allow_tf32,
                                 stream, grad_a.numel() > 0)};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("array_jagged_bmm_jagged_out", TORCH_BOX(&array_jagged_bmm_jagged_out));
  m.impl("array_jagged_bmm_jagged_out_backward", TORCH_BOX(&array_jagged_bmm_jagged_out_backward));
}

}  // namespace
}  // namespace jagged_cuda
