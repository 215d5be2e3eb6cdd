// What the glue of jagged_sum and jagged_mean shares.
#pragma once

#include "cuda/glue.h"
#include "contract/rows.h"

#include "cuda/kernels/jagged_sum.h"

#include <optional>

namespace jagged_cuda {

// x [T, ...], offsets [B + 1] -> [B, ...], by `launch` of the filled Params.
template <typename Launch>
Tensor reduce_rows(const char* op, const Tensor& x, const Tensor& offsets, const Sizes& sizes,
                   Launch launch) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.B}));
  if (sizes.B == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1);
  const bool is_double = x.scalar_type() == ScalarType::Double;
  std::optional<Tensor> partial;
  if (const int64_t slots = num_sum_slots(sizes.T); slots > 0) {
    partial =
        allocate(op, x, {slots, sizes.rest}, is_double ? ScalarType::Double : ScalarType::Float);
  }

  JaggedSumParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.partial = partial ? partial->mutable_data_ptr() : nullptr;
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.x_stride = rows.stride(0);
  params.mean = false;
  params.vectors = has_aligned_lines(rows, {0});
  params.type = element_type(x.scalar_type());
  check_cuda(op, launch(params, current_stream(x)));
  return out;
}

}  // namespace jagged_cuda
