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

// grad_out [T, ...], of a product x [T, ...] and y [B, M, ...] too, offsets [B + 1]
// -> [T, ...], [B, max_len, ...], by `launch` of the filled Params.
template <typename Launch>
std::tuple<Tensor, Tensor> combine_backward(const char* op, const Tensor& grad_out,
                                            const std::optional<Tensor>& x,
                                            const std::optional<Tensor>& y, const Tensor& offsets,
                                            int64_t max_len, const Sizes& sizes, Launch launch) {
  const torch::stable::accelerator::DeviceGuard guard(grad_out.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor grad_x = allocate(op, grad_out, with_rows_of(grad_out, 1, {sizes.T}));
  const Tensor grad_y = allocate(op, grad_out, with_rows_of(grad_out, 1, {sizes.B, max_len}));
  if ((sizes.T == 0 && sizes.B * max_len == 0) || sizes.rest == 0) return {grad_x, grad_y};
  const Tensor grad = as_contiguous(op, grad_out, 1);

  CombineBackwardParams params{};
  params.grad_out = grad.const_data_ptr();
  params.grad_x = grad_x.mutable_data_ptr();
  params.grad_y = grad_y.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.grad_stride = grad.stride(0);
  params.max_len = max_len;
  params.vectors = has_aligned_lines(grad, {0});
  params.type = element_type(grad_out.scalar_type());
  std::optional<Tensor> rows, dense;  // until the launch
  if (x && y) {
    rows = as_contiguous(op, *x, 1);
    dense = as_contiguous(op, *y, 2);
    params.x = rows->const_data_ptr();
    params.y = dense->const_data_ptr();
    params.x_stride = rows->stride(0);
    params.y_seq_stride = dense->stride(0);
    params.y_row_stride = dense->stride(1);
    // Of a tensor without elements no line is read.
    params.vectors = params.vectors && has_aligned_lines(*rows, {0}) &&
                     (dense->numel() == 0 || has_aligned_lines(*dense, {0, 1}));
  }
  check_cuda(op, launch(params, current_stream(grad_out)));
  return {grad_x, grad_y};
}

}  // namespace jagged_cuda
