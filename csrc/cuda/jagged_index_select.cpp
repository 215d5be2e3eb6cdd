#include "cuda/ranges_glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_index_select.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], index [N] -> [total], [N + 1]
Plan jagged_index_select(const Tensor& offsets, const Tensor& index, int64_t rows, int64_t total) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, index, rows, total});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), chosen = as_contiguous(op, index);
  maybe_validate_offsets(op, "offsets", bounds, rows);
  maybe_validate_index(op, "index", chosen, sizes.B);
  return plan_ranges(
      op, op, bounds, rows, sizes.N, total,
      [&](RangesParams& params) { params.chosen = chosen.const_data_ptr<int64_t>(); },
      launch_jagged_index_select);
}

// grad_out [N, ...], index [N], offsets [B + 1], taken [M + 1], chosen [M], order [M], groups [B + 1]
// -> [total, ...]
Tensor jagged_index_select_backward(const Tensor& grad_out, const Tensor& index,
                                    const Tensor& offsets, const Tensor& taken,
                                    const Tensor& chosen, const std::optional<Tensor>& order,
                                    const std::optional<Tensor>& groups, int64_t total) {
  constexpr const char* op = "jagged_index_select_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, index, offsets, taken, chosen, order, groups, total});
  const torch::stable::accelerator::DeviceGuard guard(grad_out.get_device_index());
  const Tensor out = allocate(op, grad_out, with_rows_of(grad_out, 1, {total}));
  if (total == 0 || sizes.rest == 0) return out;
  const Tensor copies = as_contiguous(op, grad_out, 1);
  const Tensor bounds = as_contiguous(op, offsets), ends = as_contiguous(op, taken);
  const bool are_grouped = order && groups;
  if (!are_grouped && std::max(sizes.M, sizes.B) > kMostCounted) {
    fail(std::string(op) + ": order and groups must be given for more than " +
         std::to_string(kMostCounted) + " copies or sequences");
  }
  const Tensor seqs = as_contiguous(op, chosen);
  std::optional<Tensor> numbers;
  if (are_grouped) numbers = as_contiguous(op, *order);
  const Tensor begins =
      are_grouped ? as_contiguous(op, *groups) : allocate(op, chosen, {sizes.B + 1});
  const Tensor rows =
      allocate(op, chosen, {sizes.M + sizes.B, 2});  // of all, and of the first ones
  GroupCopiesParams grouping{};
  grouping.taken = view_offsets(ends, sizes.N);
  grouping.chosen = seqs.const_data_ptr<int64_t>();
  grouping.order = numbers ? numbers->const_data_ptr<int64_t>() : nullptr;
  grouping.copies = static_cast<CopyRows*>(rows.mutable_data_ptr());
  grouping.firsts = grouping.copies + sizes.M;
  grouping.groups = begins.mutable_data_ptr<int64_t>();  // written without order alone
  grouping.num_seqs = sizes.B;
  check_cuda(op, launch_group_copies(grouping, current_stream(grad_out)));

  SumCopiesParams params;
  params.grad_out = copies.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, total);
  params.copies = grouping.copies;
  params.firsts = grouping.firsts;
  params.groups = begins.const_data_ptr<int64_t>();
  params.num_copies = sizes.M;
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
