#include "cuda/glue.h"
#include "cuda/kernels/jagged_jagged_bmm.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, D], y [T, N], offsets [B + 1] -> [B, D, N]
Tensor jagged_jagged_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, {sizes.B, sizes.D, sizes.N});
  if (sizes.B == 0 || sizes.D == 0 || sizes.N == 0) return out;
  const Tensor left = as_contiguous(op, x, -1), right = as_contiguous(op, y, -1);

  JaggedJaggedBmmParams params;
  params.x = left.const_data_ptr();
  params.y = right.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.rows = sizes.D;
  params.columns = sizes.N;
  params.x_stride = left.stride(0);
  params.y_stride = right.stride(0);
  params.x_vectors = has_aligned_lines(left, {0});
  params.y_vectors = has_aligned_lines(right, {0});
  params.type = element_type(x.scalar_type(), allow_tf32);
  check_cuda(op, launch_jagged_jagged_bmm(params, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_jagged_bmm", TORCH_BOX(&jagged_jagged_bmm));
}

}  // namespace
}  // namespace jagged_cuda
