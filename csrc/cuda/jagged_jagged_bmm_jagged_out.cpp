#include "cuda/glue.h"
#include "cuda/matrices.h"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"

#include <torch/csrc/stable/library.h>

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
  const Tensor out = allocate(op, x, {total_out});
  if (total_out == 0) return out;
  const Tensor left = as_contiguous(op, x, -1), right = as_contiguous(op, y, -1);

  JaggedJaggedBmmJaggedOutParams params;
  params.x = left.const_data_ptr();
  params.y = right.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.matrices = view_matrices(bounds, sizes.Tx, sizes.Ty, total_out);
  params.inner = sizes.D;
  params.x_stride = left.stride(0);
  params.y_stride = right.stride(0);
  params.x_vectors = has_aligned_lines(left, {0});
  params.y_vectors = has_aligned_lines(right, {0});
  params.mma_sync_only = mma_sync_only(op);
  params.type = element_type(x.scalar_type(), allow_tf32);
  check_cuda(op, launch_jagged_jagged_bmm_jagged_out(params, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_jagged_bmm_jagged_out", TORCH_BOX(&jagged_jagged_bmm_jagged_out));
}

}  // namespace
}  // namespace jagged_cuda
