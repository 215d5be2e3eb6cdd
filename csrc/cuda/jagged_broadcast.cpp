#include "cuda/glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_broadcast.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [B, ...], offsets [B + 1] -> [total, ...]
Tensor jagged_broadcast(const Tensor& x, const Tensor& offsets, int64_t total) {
  constexpr const char* op = "jagged_broadcast";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, total});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, total);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  if (total == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1);
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());

  const int unit_bytes = copy_unit_bytes(rows, {0});
  GatherParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, total);
  params.row_units = sizes.rest * elem_bytes / unit_bytes;
  params.seq_stride = rows.stride(0) * elem_bytes / unit_bytes;
  params.row_stride = 0;
  params.limit = total;
  check_cuda(op, launch_jagged_broadcast(params, unit_bytes, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_broadcast", TORCH_BOX(&jagged_broadcast));
}

}  // namespace
}  // namespace jagged_cuda
