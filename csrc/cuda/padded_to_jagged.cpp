#include "cuda/glue.h"
#include "contract/rows.h"
#include "cuda/kernels/padded_to_jagged.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [B, M, ...], offsets [B + 1] -> [total, ...]
Tensor padded_to_jagged(const Tensor& x, const Tensor& offsets, int64_t total) {
  constexpr const char* op = "padded_to_jagged";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, total});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, total);
  const Tensor out = allocate(op, x, with_rows_of(x, 2, {total}));
  if (total == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 2);
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());

  const int unit_bytes = copy_unit_bytes(rows, {0, 1});
  GatherParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, total);
  params.row_units = sizes.rest * elem_bytes / unit_bytes;
  params.seq_stride = rows.stride(0) * elem_bytes / unit_bytes;
  params.row_stride = rows.stride(1) * elem_bytes / unit_bytes;
  params.limit = sizes.M;
  check_cuda(op, launch_padded_to_jagged(params, unit_bytes, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("padded_to_jagged", TORCH_BOX(&padded_to_jagged));
}

}  // namespace
}  // namespace jagged_cuda
