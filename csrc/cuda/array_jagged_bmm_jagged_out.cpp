#include "cuda/glue.h"
#include "cuda/matrices.h"
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"

#include <torch/csrc/stable/library.h>

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
  const Tensor out = allocate(op, a, {total, sizes.N});
  if (total == 0 || sizes.N == 0) return out;
  const Tensor elements = as_contiguous(op, a), rows = as_contiguous(op, y, -1);

  ArrayJaggedBmmJaggedOutParams params;
  params.a = elements.const_data_ptr();
  params.y = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.matrices = view_matrices(bounds, total_rows, total_columns, sizes.elems);
  params.columns = sizes.N;
  params.y_stride = rows.stride(0);
  params.y_vectors = has_aligned_lines(rows, {0});
  params.transpose = transpose;
  params.mma_sync_only = mma_sync_only(op);
  params.type = element_type(a.scalar_type(), allow_tf32);
  check_cuda(op, launch_array_jagged_bmm_jagged_out(params, current_stream(a)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("array_jagged_bmm_jagged_out", TORCH_BOX(&array_jagged_bmm_jagged_out));
}

}  // namespace
}  // namespace jagged_cuda
