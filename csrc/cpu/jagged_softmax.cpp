// jagged_softmax on the CPU, forward and backward: items are up to kSoftmaxColumns columns of one
// sequence (kernels/softmax.inl). A sequence of more than kPartRows rows is taken in parts: their
// statistics, these combined in order, then their results.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

struct Part {
  SoftmaxItem item;
  int64_t statistics;        // index of this part's first statistic
  int64_t first_statistics;  // of the first part of the same sequence and columns
};

struct PartedColumns {
  int64_t statistics, parts, columns;
};

void run_softmax(const SoftmaxParams& params, const std::vector<Sequence>& sequences,
                 const KernelTable& table) {
  constexpr int64_t kPartRows = 8192;
  // An exponential and the passes over memory, in multiply-adds.
  constexpr int64_t kElementCost = 8;
  WorkList<SoftmaxItem> items;
  WorkList<Part> parts;
  WorkList<PartedColumns> parted;
  int64_t num_statistics = 0;
  for (const auto [begin, len] : sequences) {
    for (int64_t column = 0; column < params.columns && len > 0; column += kSoftmaxColumns) {
      const int64_t columns = std::min(kSoftmaxColumns, params.columns - column);
      if (len <= kPartRows) {
        items.add({begin, len, column, columns}, len * (columns + 8) * kElementCost);
        continue;
      }
      const int64_t first = num_statistics;
      for (int64_t row = 0; row < len; row += kPartRows, num_statistics += columns) {
        const int64_t rows = std::min(kPartRows, len - row);
        parts.add({{begin + row, rows, column, columns}, num_statistics, first},
                  rows * columns * kElementCost);
      }
      const int64_t num_parts = (num_statistics - first) / columns;
      parted.add({first, num_parts, columns}, num_parts * columns * kElementCost);
    }
  }

  const Kernels& kernels = table.of(params.element);
  const size_t bytes = scratch_bytes<SoftmaxBuffers>(params.element, params);
  const int64_t accumulator_bytes = params.element == Element::kDouble ? 8 : 4;
  const AlignedBuffer max(static_cast<size_t>(num_statistics * accumulator_bytes));
  const AlignedBuffer sum(static_cast<size_t>(num_statistics * accumulator_bytes));
  const auto at = [&](const AlignedBuffer& buffer, int64_t index) -> void* {
    return static_cast<char*>(buffer.data()) + index * accumulator_bytes;
  };
  items.run(bytes, [&](const SoftmaxItem& item, void* scratch) {
    kernels.softmax(params, item, scratch);
  });
  parts.run(bytes, [&](const Part& part, void* scratch) {
    kernels.softmax_statistics(params, part.item, at(max, part.statistics),
                               at(sum, part.statistics), scratch);
  });
  parted.run(0, [&](const PartedColumns& columns, void*) {
    kernels.softmax_combine(params, at(max, columns.statistics), at(sum, columns.statistics),
                            columns.parts, columns.columns);
  });
  parts.run(bytes, [&](const Part& part, void* scratch) {
    kernels.softmax_write(params, part.item, at(max, part.first_statistics),
                          at(sum, part.first_statistics), scratch);
  });
}

// Both directions: `x` is the input or the forward's result, `grad_out` null or given.
Tensor run(const char* op, Tensor x, const Tensor* grad_out, const Tensor& offsets, double scale,
           const Sizes& sizes) {
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  x = as_contiguous(op, x, 1);
  const Tensor grad = grad_out ? as_contiguous(op, *grad_out, 1) : x;
  Tensor out = allocate(op, x, x.sizes());
  const KernelTable& table = kernel_table();
  SoftmaxParams params{};
  params.element = element_of(x);
  params.backward = grad_out != nullptr;
  params.x = x.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.grad_out = grad.const_data_ptr();
  params.grad_row_stride = grad.stride(0);
  params.out = out.mutable_data_ptr();
  params.columns = sizes.rest;
  params.scale = scale;
  zero_rows_outside(sequences, sizes.T, sizes.rest * element_bytes(params.element), params.out);
  run_softmax(params, sequences, table);
  record_kernel(table.name);
  return out;
}

Tensor jagged_softmax(Tensor x, Tensor offsets, double scale) {
  constexpr const char* op = "jagged_softmax";
  static const Contract contract(op);
  return run(op, x, nullptr, offsets, scale, contract.check({x, offsets, scale}));
}

Tensor jagged_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, double scale) {
  constexpr const char* op = "jagged_softmax_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, out, offsets, scale});
  return run(op, out, &grad_out, offsets, scale, sizes);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_softmax", TORCH_BOX(&jagged_cuda::cpu::jagged_softmax));
  m.impl("jagged_softmax_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_softmax_backward));
}
