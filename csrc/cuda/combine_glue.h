// What the glue of jagged_dense_add and jagged_dense_mul shares.
#pragma once

#include "cuda/glue.h"
#include "contract/rows.h"

#include "cuda/kernels/rows/combine.h"

namespace jagged_cuda {

// x [T, ...], y [B, M, ...], offsets [B + 1] -> [T, ...], by `launch` of the filled Params.
template <typename Launch>
Tensor combine_with_dense(const char* op, const Tensor& x, const Tensor& y, const Tensor& offsets,
                          const Sizes& sizes, Launch launch) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.T}));
  if (sizes.T == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1), dense = as_contiguous(op, y, 2);

  CombineParams params;
  params.x = rows.const_data_ptr();
  params.y = dense.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.x_stride = rows.stride(0);
  params.y_seq_stride = dense.stride(0);
  params.y_row_stride = dense.stride(1);
  params.max_len = sizes.M;
  // Of a tensor without elements no line is read.
  params.vectors =
      has_aligned_lines(rows, {0}) && (dense.numel() == 0 || has_aligned_lines(dense, {0, 1}));
  check_cuda(op, launch(params, current_stream(x)));
  return out;
}

}  // namespace jagged_cuda
