#include "cuda/glue.h"
#include "cuda/kernels/jagged_dense_bmm.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// y [B, D, N] as the kernel takes it: stride 1 along D or N. A dimension of size 1 has any stride,
// so both may serve; then the one whose lines are aligned.
struct DenseOperand {
  Tensor y;
  bool along_inner;
  bool vectors;
};

DenseOperand prepare_dense(const Tensor& y) {
  const bool along_columns = y.stride(2) == 1 || y.size(2) <= 1;
  const bool along_inner = y.stride(1) == 1 || y.size(1) <= 1;
  const bool columns_aligned = along_columns && has_aligned_lines(y, {0, 1});
  const bool inner_aligned = along_inner && has_aligned_lines(y, {0, 2});
  if (columns_aligned) return {y, false, true};
  if (inner_aligned) return {y, true, true};
  if (along_columns) return {y, false, false};
  if (along_inner) return {y, true, false};
  const Tensor copy = contiguous_copy("jagged_dense_bmm", y);
  return {copy, false, has_aligned_lines(copy, {0, 1})};
}

// x [T, D], y [B, D, N], offsets [B + 1], bias [B, N] or none -> [T, N]
Tensor jagged_dense_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32,
                        const std::optional<Tensor>& bias, int64_t activation) {
  constexpr const char* op = "jagged_dense_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32, bias, activation});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, {sizes.T, sizes.N});
  if (sizes.T == 0 || sizes.N == 0) return out;
  const Tensor rows = as_contiguous(op, x, -1);
  const DenseOperand dense = prepare_dense(y);
  const std::optional<Tensor> bias_rows =
      bias ? std::optional<Tensor>(as_contiguous(op, *bias, -1)) : std::nullopt;

  JaggedDenseBmmParams params;
  params.x = rows.const_data_ptr();
  params.y = dense.y.const_data_ptr();
  params.bias = bias_rows ? bias_rows->const_data_ptr() : nullptr;
  params.bias_stride = bias_rows ? bias_rows->stride(0) : 0;
  params.activation = static_cast<Activation>(activation);
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.inner = sizes.D;
  params.columns = sizes.N;
  params.x_stride = rows.stride(0);
  params.y_seq_stride = dense.y.stride(0);
  params.y_stride = dense.y.stride(dense.along_inner ? 2 : 1);
  params.y_along_inner = dense.along_inner;
  params.x_vectors = has_aligned_lines(rows, {0});
  params.y_vectors = dense.vectors;
  params.type = element_type(x.scalar_type(), allow_tf32);
  check_cuda(op, launch_jagged_dense_bmm(params, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_bmm", TORCH_BOX(&jagged_dense_bmm));
}

}  // namespace
}  // namespace jagged_cuda
