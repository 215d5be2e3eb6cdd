#include "cuda/ranges_glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/jagged_take.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

constexpr const char* kFunction = "jagged_index_select";  // messages name it

// The plan that takes the sequences `chosen` of contiguous offsets, in `rows` rows.
Plan plan_sequences(const Tensor& bounds, const Tensor& chosen, int64_t rows, int64_t total) {
  return plan_ranges(
      kFunction, kFunction, bounds, rows, chosen.size(0), total,
      [&](RangesParams& params) { params.chosen = chosen.const_data_ptr<int64_t>(); },
      launch_jagged_index_select_plan);
}

// offsets [B + 1], index [N] -> [total], [N + 1]
Plan jagged_index_select_plan(const Tensor& offsets, const Tensor& index, int64_t rows,
                              int64_t total) {
  constexpr const char* op = "jagged_index_select_plan";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, index, rows, total});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), chosen = as_contiguous(op, index);
  maybe_validate_offsets(kFunction, "offsets", bounds, rows);
  maybe_validate_index(kFunction, "index", chosen, sizes.B);
  return plan_sequences(bounds, chosen, rows, total);
}

// x [T, ...], offsets [B + 1], index [N] -> [total, ...], [N + 1]
std::tuple<Tensor, Tensor> jagged_index_select(const Tensor& x, const Tensor& offsets,
                                               const Tensor& index, int64_t total) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, index, total});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), chosen = as_contiguous(op, index);
  const Tensor rows = as_contiguous(op, x, 1);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  maybe_validate_index(op, "index", chosen, sizes.B);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int unit_bytes = copy_unit_bytes(rows, {0});
  const int64_t stride = rows.stride(0) * elem_bytes / unit_bytes;
  const int64_t row_units = sizes.rest * elem_bytes / unit_bytes;

  if (std::max(sizes.N, sizes.B) > kMostCounted) {
    auto [taken, planned] = plan_sequences(bounds, chosen, sizes.T, total);
    if (total == 0 || row_units == 0) return {out, planned};
    JaggedTakeParams params;
    params.unit_bytes = unit_bytes;
    params.x = rows.const_data_ptr();
    params.total = sizes.T;
    params.stride = stride;
    params.index = taken.const_data_ptr<int64_t>();
    params.out = out.mutable_data_ptr();
    params.rows = total;
    params.row_units = row_units;
    check_cuda(op, launch_jagged_take(params, current_stream(x)));
    return {out, planned};
  }

  const PlannedOffsets planned(op, bounds, total, sizes.N);
  const Tensor copies = allocate(op, chosen, {sizes.N + sizes.B, 2});  // all, and the first ones
  const Tensor groups = allocate(op, chosen, {sizes.B + 1});
  GroupCopiesParams grouping{};
  grouping.source = view_offsets(bounds, sizes.T);
  grouping.chosen = chosen.const_data_ptr<int64_t>();
  grouping.planned = planned.offsets.mutable_data_ptr();
  grouping.uncut = planned.uncut_data();
  grouping.capacity = planned.capacity;
  grouping.copies = static_cast<CopyRows*>(copies.mutable_data_ptr());
  grouping.firsts = grouping.copies + sizes.N;
  grouping.groups = groups.mutable_data_ptr<int64_t>();
  grouping.num_copies = sizes.N;
  grouping.num_seqs = sizes.B;
  check_cuda(op, launch_group_copies(grouping, current_stream(x)));

  WriteCopiesParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = grouping.source;
  params.taken = view_offsets(planned.offsets, total);
  params.copies = grouping.copies;
  params.firsts = grouping.firsts;
  params.groups = grouping.groups;
  params.num_copies = sizes.N;
  params.row_units = row_units;
  params.stride = stride;
  params.unit_bytes = unit_bytes;
  check_cuda(op, launch_jagged_index_select(params, current_stream(x)));
  planned.maybe_validate(op);
  return {out, planned.offsets};
}

// grad_out [N, ...], offsets [B + 1], taken [M + 1], chosen [M], order [M], groups [B + 1]
// -> [total, ...]
Tensor jagged_index_select_backward(const Tensor& grad_out, const Tensor& offsets,
                                    const Tensor& taken, const Tensor& chosen,
                                    const std::optional<Tensor>& order,
                                    const std::optional<Tensor>& groups, int64_t total) {
  constexpr const char* op = "jagged_index_select_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, taken, chosen, order, groups, total});
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
  const Tensor rows =
      allocate(op, chosen, {sizes.M + sizes.B, 2});  // of all copies, and of the first ones
  std::optional<Tensor> numbers, begins, tiles;      // until the launches
  CopyRows* all = static_cast<CopyRows*>(rows.mutable_data_ptr());

  SumCopiesParams params{};
  params.grad_out = copies.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, total);
  params.copies = all;
  params.num_copies = sizes.M;
  params.num_rows = sizes.N;
  params.columns = sizes.rest;
  params.stride = copies.stride(0);
  params.vectors = has_aligned_lines(copies, {0});
  params.type = element_type(grad_out.scalar_type());
  if (are_grouped) {
    numbers = as_contiguous(op, *order);
    begins = as_contiguous(op, *groups);
    FollowOrderParams following;
    following.taken = view_offsets(ends, sizes.N);
    following.chosen = seqs.const_data_ptr<int64_t>();
    following.order = numbers->const_data_ptr<int64_t>();
    following.groups = begins->const_data_ptr<int64_t>();
    following.copies = all;
    following.firsts = all + sizes.M;
    following.num_copies = sizes.M;
    following.num_seqs = sizes.B;
    check_cuda(op, launch_follow_order(following, current_stream(grad_out)));
    params.firsts = following.firsts;
    params.groups = following.groups;
  } else {
    FindTilesParams finding;
    finding.tile_log2 = found_tile_log2(sizes.rest * static_cast<int64_t>(copies.element_size()));
    finding.num_tiles = num_tiles(total, sizes.B, 1 << finding.tile_log2);
    tiles = allocate(op, chosen, {finding.num_tiles, 4});  // a FoundTile each
    finding.taken = view_offsets(ends, sizes.N);
    finding.source = params.offsets;
    finding.chosen = seqs.const_data_ptr<int64_t>();
    finding.copies = all;
    finding.tiles = static_cast<FoundTile*>(tiles->mutable_data_ptr());
    finding.num_copies = sizes.M;
    finding.num_seqs = sizes.B;
    check_cuda(op, launch_find_tiles(finding, current_stream(grad_out)));
    params.tiles = finding.tiles;
    params.num_tiles = finding.num_tiles;
  }
  check_cuda(op, launch_jagged_index_select_backward(params, current_stream(grad_out)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_index_select_plan", TORCH_BOX(&jagged_index_select_plan));
  m.impl("jagged_index_select", TORCH_BOX(&jagged_index_select));
  m.impl("jagged_index_select_backward", TORCH_BOX(&jagged_index_select_backward));
}

}  // namespace
}  // namespace jagged_cuda
