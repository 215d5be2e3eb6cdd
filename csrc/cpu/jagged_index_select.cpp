// jagged_index_select on the CPU: items are the sequences of the result, or for the gradient those
// that were taken.
#include "contract/rows.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

constexpr const char* kFunction = "jagged_index_select";  // messages name it

// The rows of each sequence that is taken.
std::vector<Sequence> chosen_sequences(const Tensor& offsets, const Tensor& index, int64_t rows) {
  const auto sequences = read_sequences(kFunction, "offsets", offsets, rows);
  const Tensor dense = as_contiguous(kFunction, index);
  const int64_t* chosen = dense.const_data_ptr<int64_t>();
  enforce(kFunction, "index",
          IndexRule{chosen, index.size(0), static_cast<int64_t>(sequences.size())});
  std::vector<Sequence> ranges(static_cast<size_t>(index.size(0)));
  for (size_t i = 0; i < ranges.size(); ++i) ranges[i] = sequences[static_cast<size_t>(chosen[i])];
  return ranges;
}

Plan jagged_index_select_plan(Tensor offsets, Tensor index, int64_t rows, int64_t total) {
  constexpr const char* op = "jagged_index_select_plan";
  static const Contract contract(op);
  contract.check({offsets, index, rows, total});
  const std::vector<Sequence> ranges = chosen_sequences(offsets, index, rows);
  record_kernel(kernel_table().name);
  return plan_ranges(kFunction, offsets, ranges, total);
}

std::tuple<Tensor, Tensor> jagged_index_select(Tensor x, Tensor offsets, Tensor index,
                                               int64_t total) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, index, total});
  const std::vector<Sequence> ranges = chosen_sequences(offsets, index, sizes.T);
  const int64_t capacity = plan_capacity(offsets.scalar_type(), total);
  const std::vector<int64_t> ends = running_sum(ranges);
  Tensor planned = planned_offsets(op, offsets, ends, capacity);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  const int64_t row_bytes = sizes.rest * static_cast<int64_t>(x.element_size());
  x = as_contiguous(op, x, 1);
  const int64_t stride =
      x.size(0) > 1 ? x.stride(0) * static_cast<int64_t>(x.element_size()) : row_bytes;
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const auto end_of = [&](size_t i) { return std::min(ends[i], capacity); };
  WorkList<int64_t> items;
  for (size_t i = 0; i < ranges.size() && row_bytes > 0; ++i) {
    items.add(static_cast<int64_t>(i), ranges[i].len * row_bytes * kByteCost);
  }
  items.run(0, [&](int64_t item, void*) {
    const size_t i = static_cast<size_t>(item);
    if (const int64_t rows = end_of(i + 1) - end_of(i); rows > 0) {
      copy_rows(to + end_of(i) * row_bytes, from + ranges[i].begin * stride, rows, row_bytes,
                stride);
    }
  });
  const int64_t used = end_of(ranges.size());
  if (row_bytes > 0 && total > used) {
    std::memset(to + used * row_bytes, 0, static_cast<size_t>((total - used) * row_bytes));
  }
  record_kernel(kernel_table().name);
  return {out, planned};
}

// Adds the rows of each copy of a sequence, one copy after another.
template <class Element, class Sum>
void add_copies(const Element* copies, int64_t row_stride, const std::vector<int64_t>& begins,
                const std::vector<int64_t>& lens, int64_t rows, int64_t columns, Element* out) {
  std::vector<Sum> sums(static_cast<size_t>(columns));
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (size_t copy = 0; copy < begins.size(); ++copy) {
      if (row >= lens[copy]) continue;
      const Element* from = copies + (begins[copy] + row) * row_stride;
      for (int64_t i = 0; i < columns; ++i) {
        sums[static_cast<size_t>(i)] += static_cast<Sum>(from[i]);
      }
    }
    for (int64_t i = 0; i < columns; ++i) {
      out[row * columns + i] = static_cast<Element>(sums[static_cast<size_t>(i)]);
    }
  }
}

// The copies of each sequence, in their own order.
std::vector<std::vector<int64_t>> group_copies(const Tensor& chosen, int64_t num_seqs) {
  const int64_t* numbers = chosen.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> groups(static_cast<size_t>(num_seqs));
  for (int64_t copy = 0; copy < chosen.size(0); ++copy) {
    const int64_t seq = numbers[copy];
    if (seq >= 0 && seq < num_seqs) groups[static_cast<size_t>(seq)].push_back(copy);
  }
  return groups;
}

// How the copies are grouped (`order`, `groups`) follows from `chosen`, and is for others.
Tensor jagged_index_select_backward(Tensor grad_out, Tensor offsets, Tensor taken, Tensor chosen,
                                    std::optional<Tensor> order, std::optional<Tensor> groups,
                                    int64_t total) {
  constexpr const char* op = "jagged_index_select_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, taken, chosen, order, groups, total});
  const auto sequences = read_sequences(op, "offsets", offsets, total);
  const auto copies = read_sequences(op, "taken", taken, sizes.N);
  const auto grouped = group_copies(as_contiguous(op, chosen), sizes.B);
  grad_out = as_contiguous(op, grad_out, 1);
  Tensor out = allocate(op, grad_out, with_rows_of(grad_out, 1, {total}));
  const int64_t elem_bytes = static_cast<int64_t>(out.element_size());
  zero_rows_outside(sequences, total, sizes.rest * elem_bytes, out.mutable_data_ptr());

  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B && sizes.rest > 0; ++seq) {
    items.add(seq, sequences[static_cast<size_t>(seq)].len * sizes.rest * elem_bytes * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) {
    const Sequence rows = sequences[static_cast<size_t>(seq)];
    std::vector<int64_t> begins, lens;
    for (const int64_t copy : grouped[static_cast<size_t>(seq)]) {
      begins.push_back(copies[static_cast<size_t>(copy)].begin);
      lens.push_back(copies[static_cast<size_t>(copy)].len);
    }
    const auto add = [&](auto element, auto sum) {
      using Element = decltype(element);
      add_copies<Element, decltype(sum)>(
          static_cast<const Element*>(grad_out.const_data_ptr()), grad_out.stride(0), begins, lens,
          rows.len, sizes.rest,
          static_cast<Element*>(out.mutable_data_ptr()) + rows.begin * sizes.rest);
    };
    switch (grad_out.scalar_type()) {
      case ScalarType::Double:
        return add(double{}, double{});
      case ScalarType::Half:
        return add(torch::headeronly::Half{}, float{});
      case ScalarType::BFloat16:
        return add(torch::headeronly::BFloat16{}, float{});
      default:
        return add(float{}, float{});
    }
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_index_select_plan", TORCH_BOX(&jagged_cuda::cpu::jagged_index_select_plan));
  m.impl("jagged_index_select", TORCH_BOX(&jagged_cuda::cpu::jagged_index_select));
  m.impl("jagged_index_select_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_index_select_backward));
}
