// jagged_concat on the CPU, and its gradients: items are sequences.
#include "contract/rows.h"

#include <torch/csrc/stable/library.h>

#include <array>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

constexpr size_t kParts = 4;
using Given = std::array<std::optional<Tensor>, kParts>;
using PartRows = std::array<int64_t, kParts>;

// The sequences of each part: those of its offsets, or as many rows each.
std::array<std::vector<Sequence>, kParts> read_parts(const char* op, const Given& offsets,
                                                     const PartRows& rows, int64_t num_seqs) {
  std::array<std::vector<Sequence>, kParts> parts;
  for (size_t p = 0; p < kParts; ++p) {
    if (offsets[p]) {
      parts[p] = read_sequences(op, "offsets", *offsets[p], rows[p]);
      continue;
    }
    const int64_t each = num_seqs == 0 ? 0 : rows[p] / num_seqs;
    for (int64_t seq = 0; seq < num_seqs; ++seq) parts[p].push_back({seq * each, each});
  }
  return parts;
}

// Where each sequence of the result begins, uncut: [B + 1].
std::vector<int64_t> joined_ends(const std::array<std::vector<Sequence>, kParts>& parts,
                                 int64_t num_seqs) {
  std::vector<int64_t> ends{0};
  for (size_t seq = 0; seq < static_cast<size_t>(num_seqs); ++seq) {
    int64_t len = 0;
    for (const auto& part : parts) len += part[seq].len;
    ends.push_back(ends.back() + len);
  }
  return ends;
}

// move(part, row, joined_row, rows) for what each sequence has in each part, as far as `capacity`
// goes.
template <class Move>
void for_each_run(const std::array<std::vector<Sequence>, kParts>& parts,
                  const std::vector<int64_t>& ends, int64_t capacity, int64_t row_bytes,
                  const Move& move) {
  WorkList<int64_t> items;
  for (size_t seq = 0; seq + 1 < ends.size(); ++seq) {
    items.add(static_cast<int64_t>(seq), (ends[seq + 1] - ends[seq]) * row_bytes * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) {
    int64_t joined_row = ends[static_cast<size_t>(seq)];
    for (size_t p = 0; p < kParts; ++p) {
      const Sequence& rows = parts[p][static_cast<size_t>(seq)];
      const int64_t fits = std::min(rows.len, capacity - joined_row);
      if (fits > 0) move(p, rows.begin, joined_row, fits);
      joined_row += rows.len;
    }
  });
}

Plan jagged_concat(Tensor x, std::optional<Tensor> x_offsets, Tensor offsets, int64_t total,
                   std::optional<Tensor> y, std::optional<Tensor> y_offsets,
                   std::optional<Tensor> z, std::optional<Tensor> z_offsets,
                   std::optional<Tensor> w, std::optional<Tensor> w_offsets) {
  constexpr const char* op = "jagged_concat";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({x, x_offsets, offsets, total, y, y_offsets, z, z_offsets, w, w_offsets});
  Given given{x, y, z, w};
  PartRows rows{};
  for (size_t p = 0; p < kParts; ++p) {
    if (!given[p]) continue;
    given[p] = as_contiguous(op, *given[p], 1);
    rows[p] = given[p]->size(0);
  }
  const auto parts = read_parts(op, {x_offsets, y_offsets, z_offsets, w_offsets}, rows, sizes.B);
  const auto ends = joined_ends(parts, sizes.B);
  const int64_t capacity = plan_capacity(offsets.scalar_type(), total);
  Tensor planned = planned_offsets(op, offsets, ends, capacity);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  char* result = static_cast<char*>(out.mutable_data_ptr());
  if (row_bytes > 0) {
    for_each_run(parts, ends, capacity, row_bytes,
                 [&](size_t p, int64_t row, int64_t joined_row, int64_t run) {
                   const Tensor& part = *given[p];
                   const int64_t stride = part.stride(0) * elem_bytes;
                   copy_rows(result + joined_row * row_bytes,
                             static_cast<const char*>(part.const_data_ptr()) + row * stride, run,
                             row_bytes, run > 1 ? stride : row_bytes);
                 });
    const int64_t used = std::min(ends.back(), capacity);
    std::memset(result + used * row_bytes, 0, static_cast<size_t>((total - used) * row_bytes));
  }
  record_kernel(kernel_table().name);
  return {out, planned};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_concat_backward(
    Tensor grad_out, Tensor offsets, int64_t x_rows, std::optional<Tensor> x_offsets,
    int64_t y_rows, std::optional<Tensor> y_offsets, int64_t z_rows,
    std::optional<Tensor> z_offsets, int64_t w_rows, std::optional<Tensor> w_offsets) {
  constexpr const char* op = "jagged_concat_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, x_rows, x_offsets, y_rows, y_offsets,
                                      z_rows, z_offsets, w_rows, w_offsets});
  const PartRows rows{x_rows, y_rows, z_rows, w_rows};
  const auto parts = read_parts(op, {x_offsets, y_offsets, z_offsets, w_offsets}, rows, sizes.B);
  const auto ends = joined_ends(parts, sizes.B);
  const int64_t capacity = plan_capacity(offsets.scalar_type(), sizes.N);
  grad_out = as_contiguous(op, grad_out, 1);
  const int64_t elem_bytes = static_cast<int64_t>(grad_out.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes, stride = grad_out.stride(0) * elem_bytes;
  const auto zeros = [&](size_t p) {
    Tensor part = allocate(op, grad_out, with_rows_of(grad_out, 1, {rows[p]}));
    if (rows[p] * row_bytes > 0) {
      std::memset(part.mutable_data_ptr(), 0, static_cast<size_t>(rows[p] * row_bytes));
    }
    return part;
  };
  std::array<Tensor, kParts> gradients{zeros(0), zeros(1), zeros(2), zeros(3)};
  if (row_bytes > 0) {
    for_each_run(
        parts, ends, capacity, row_bytes,
        [&](size_t p, int64_t row, int64_t joined_row, int64_t run) {
          char* to = static_cast<char*>(gradients[p].mutable_data_ptr()) + row * row_bytes;
          copy_rows(to, static_cast<const char*>(grad_out.const_data_ptr()) + joined_row * stride,
                    run, row_bytes, run > 1 ? stride : row_bytes);
        });
  }
  record_kernel(kernel_table().name);
  return {gradients[0], gradients[1], gradients[2], gradients[3]};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_concat", TORCH_BOX(&jagged_cuda::cpu::jagged_concat));
  m.impl("jagged_concat_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_concat_backward));
}
