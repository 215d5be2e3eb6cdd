#include "cuda/plan.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_concat.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <limits>

namespace jagged_cuda {
namespace {

using Given = std::array<std::optional<Tensor>, kConcatParts>;

// The offsets of each part, contiguous and checked; `rows` are those of its tensor.
Given offsets_of_parts(const char* op, const Given& offsets,
                       const std::array<int64_t, kConcatParts>& rows) {
  Given bounds;
  bool is_first = true;
  for (size_t p = 0; p < kConcatParts; ++p) {
    if (!offsets[p]) continue;
    bounds[p] = as_contiguous(op, *offsets[p]);
    maybe_validate_offsets(op, "offsets", *bounds[p], rows[p], std::nullopt, is_first);
    is_first = false;
  }
  return bounds;
}

// The parts without data.
JoinedView view_joined(const Given& bounds, const std::array<int64_t, kConcatParts>& rows,
                       int64_t num_seqs, int64_t total) {
  JoinedView joined{};
  joined.num_seqs = num_seqs;
  joined.total = total;
  for (size_t p = 0; p < kConcatParts; ++p) {
    ConcatPart& part = joined.parts[p];
    part.offsets = bounds[p] ? view_offsets(*bounds[p], rows[p]) : OffsetsView{};
    part.offsets.total = rows[p];
    part.each = bounds[p] || num_seqs == 0 ? 0 : rows[p] / num_seqs;
  }
  return joined;
}

// x, y, z, w [.., ...], their offsets [B + 1] -> [total, ...], [B + 1]
Plan jagged_concat(const Tensor& x, const std::optional<Tensor>& x_offsets, const Tensor& offsets,
                   int64_t total, const std::optional<Tensor>& y,
                   const std::optional<Tensor>& y_offsets, const std::optional<Tensor>& z,
                   const std::optional<Tensor>& z_offsets, const std::optional<Tensor>& w,
                   const std::optional<Tensor>& w_offsets) {
  constexpr const char* op = "jagged_concat";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({x, x_offsets, offsets, total, y, y_offsets, z, z_offsets, w, w_offsets});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Given given{x, y, z, w};
  std::array<int64_t, kConcatParts> rows{};
  for (size_t p = 0; p < kConcatParts; ++p) rows[p] = given[p] ? given[p]->size(0) : 0;
  const Given bounds = offsets_of_parts(op, {x_offsets, y_offsets, z_offsets, w_offsets}, rows);
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  const Tensor planned = allocate(op, offsets, {sizes.B + 1});
  std::optional<Tensor> uncut;
  if (check_mode() != CheckMode::kOff) {
    uncut = allocate(op, offsets, {sizes.B + 1}, ScalarType::Long);
  }
  const int64_t capacity = plan_capacity(offsets.scalar_type(), total);
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());

  JaggedConcatParams params{};
  params.joined = view_joined(bounds, rows, sizes.B, capacity);
  Given parts;
  params.unit_bytes = kVectorBytes;
  for (size_t p = 0; p < kConcatParts; ++p) {
    if (!given[p]) continue;
    parts[p] = as_contiguous(op, *given[p], 1);
    params.unit_bytes = std::min(params.unit_bytes, copy_unit_bytes(*parts[p], {0}));
  }
  for (size_t p = 0; p < kConcatParts; ++p) {
    if (!parts[p]) continue;
    params.joined.parts[p].data = const_cast<void*>(parts[p]->const_data_ptr());
    params.joined.parts[p].stride = parts[p]->stride(0) * elem_bytes / params.unit_bytes;
  }
  params.out = out.mutable_data_ptr();
  params.planned = planned.mutable_data_ptr();
  params.uncut = uncut ? uncut->mutable_data_ptr<int64_t>() : nullptr;
  params.rows = total;
  params.row_units = sizes.rest * elem_bytes / params.unit_bytes;
  params.wide = offsets.scalar_type() == ScalarType::Long;
  check_cuda(op, launch_jagged_concat(params, current_stream(x)));
  if (uncut) {
    maybe_validate_offsets(op, kPlannedOffsets, *uncut, capacity, std::nullopt, /*is_first=*/false);
  }
  return {out, planned};
}

// grad_out [N, ...], the offsets [B + 1] and rows of the parts -> [rows, ...] of each
std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_concat_backward(
    const Tensor& grad_out, const Tensor& offsets, int64_t x_rows,
    const std::optional<Tensor>& x_offsets, int64_t y_rows, const std::optional<Tensor>& y_offsets,
    int64_t z_rows, const std::optional<Tensor>& z_offsets, int64_t w_rows,
    const std::optional<Tensor>& w_offsets) {
  constexpr const char* op = "jagged_concat_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, x_rows, x_offsets, y_rows, y_offsets,
                                      z_rows, z_offsets, w_rows, w_offsets});
  const torch::stable::accelerator::DeviceGuard guard(grad_out.get_device_index());
  const std::array<int64_t, kConcatParts> rows{x_rows, y_rows, z_rows, w_rows};
  const auto part = [&](size_t p) {
    return allocate(op, grad_out, with_rows_of(grad_out, 1, {rows[p]}));
  };
  const std::array<Tensor, kConcatParts> parts{part(0), part(1), part(2), part(3)};
  const int64_t all = x_rows + y_rows + z_rows + w_rows;
  if (all > 0 && sizes.rest > 0) {
    const Given bounds = offsets_of_parts(op, {x_offsets, y_offsets, z_offsets, w_offsets}, rows);
    const Tensor joined = as_contiguous(op, grad_out, 1);
    const int64_t elem_bytes = static_cast<int64_t>(grad_out.element_size());

    JaggedConcatBackwardParams params{};
    params.joined =
        view_joined(bounds, rows, sizes.B, plan_capacity(offsets.scalar_type(), sizes.N));
    params.unit_bytes = copy_unit_bytes(joined, {0});
    params.row_units = sizes.rest * elem_bytes / params.unit_bytes;
    for (size_t p = 0; p < kConcatParts; ++p) {
      params.joined.parts[p].data = parts[p].mutable_data_ptr();
      params.joined.parts[p].stride = params.row_units;
    }
    params.grad_out = joined.const_data_ptr();
    params.stride = joined.stride(0) * elem_bytes / params.unit_bytes;
    check_cuda(op, launch_jagged_concat_backward(params, current_stream(grad_out)));
  }
  return {parts[0], parts[1], parts[2], parts[3]};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_concat", TORCH_BOX(&jagged_concat));
  m.impl("jagged_concat_backward", TORCH_BOX(&jagged_concat_backward));
}

}  // namespace
}  // namespace jagged_cuda
