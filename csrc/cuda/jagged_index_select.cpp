#include "cuda/ranges_glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_index_select.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], index [N] -> [total], [N + 1]
Plan jagged_index_select(const Tensor& offsets, const Tensor& index, int64_t rows, int64_t total,
                         int64_t function) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, index, rows, total, function});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), chosen = as_contiguous(op, index);
  const char* asked = kIndexSelectFunctions[function];
  maybe_validate_offsets(asked, "offsets", bounds, rows);
  maybe_validate_index(asked, "index", chosen, sizes.B);
  return plan_ranges(
      op, asked, bounds, rows, sizes.N, total,
      [&](RangesParams& params) { params.chosen = chosen.const_data_ptr<int64_t>(); },
      launch_jagged_index_select);
}

// grad_out [N, ...], index [N], offsets [B + 1], taken [M + 1], order [M], groups [B + 1] -> [total, ...]
Tensor jagged_index_select_backward(const Tensor& grad_out, const Tensor& index,
                                    const Tensor& offsets, const Tensor& taken, const Tensor& order,
                                    const Tensor& groups, int64_t total) {
  constexpr const char* op = "jagged_index_select_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, index, offsets, taken, order, groups, total});
  const torch::stable::accelerator::DeviceGuard guard(grad_out.get_device_index());
  const Tensor out = allocate(op, grad_out, with_rows_of(grad_out, 1, {total}));
  if (total == 0 || sizes.rest == 0) return out;
  const Tensor copies = as_contiguous(op, grad_out, 1);
  const Tensor bounds = as_contiguous(op, offsets), ends = as_contiguous(op, taken);
  const Tensor numbers = as_contiguous(op, order), begins = as_contiguous(op, groups);

  SumCopiesParams params;
  params.copies = copies.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, total);
  params.taken = view_offsets(ends, sizes.N);
  params.order = numbers.const_data_ptr<int64_t>();
  params.groups = begins.const_data_ptr<int64_t>();
  params.columns = sizes.rest;
  params.stride = copies.stride(0);
  params.vectors = has_aligned_lines(copies, {0});
  params.type = element_type(grad_out.scalar_type());
  check_cuda(op, launch_jagged_index_select_backward(params, current_stream(grad_out)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_index_select", TORCH_BOX(&jagged_index_select));
  m.impl("jagged_index_select_backward", TORCH_BOX(&jagged_index_select_backward));
}

}  // namespace
}  // namespace jagged_cuda
