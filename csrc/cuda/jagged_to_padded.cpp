#include "cuda/glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_to_padded.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// An element of `elem_bytes`, repeated to fill 8 bytes.
uint64_t repeat_element(uint64_t bits, int64_t elem_bytes) {
  for (int64_t bytes = elem_bytes; bytes < 8; bytes *= 2) bits |= bits << (8 * bytes);
  return bits;
}

// x [T, ...], offsets [B + 1] -> [B, max_len, ...]
Tensor jagged_to_padded(const Tensor& x, const Tensor& offsets, int64_t max_len, double fill) {
  constexpr const char* op = "jagged_to_padded";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, max_len, fill});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.B, max_len}));
  if (sizes.B == 0 || max_len == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1);
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());

  JaggedToPaddedParams params;
  params.unit_bytes = copy_unit_bytes(rows, {0});
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.max_len = max_len;
  params.row_units = sizes.rest * elem_bytes / params.unit_bytes;
  params.x_stride = rows.stride(0) * elem_bytes / params.unit_bytes;
  params.fill = repeat_element(element_bits(x.scalar_type(), fill), elem_bytes);
  check_cuda(op, launch_jagged_to_padded(params, current_stream(x)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_to_padded", TORCH_BOX(&jagged_to_padded));
}

}  // namespace
}  // namespace jagged_cuda
