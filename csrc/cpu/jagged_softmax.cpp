// jagged_softmax on the CPU, forward and backward: items are up to kSoftmaxColumns columns of one
// sequence (kernels/softmax.inl). A sequence of more than kPartRows rows is taken in parts: their
// statistics, these combined in order, then their results.
#include "contract/jagged_softmax.h"

#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

constexpr int64_t kPartRows = 8192;
constexpr int64_t kElementCost = 8;  // an exponential and the passes over memory, in multiply-adds

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
  const size_t bytes = params.element == Element::kDouble
                           ? scratch_bytes<SoftmaxBuffers<double>>(params)
                           : scratch_bytes<SoftmaxBuffers<float>>(params);
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

// A contiguous tensor of the shape and dtype of `like`.
Tensor allocate_contiguous(const char* op, const Tensor& like) {
  std::vector<int64_t> shape;
  for (int64_t dim = 0; dim < like.dim(); ++dim) shape.push_back(like.size(dim));
  try {
    return torch::stable::new_empty(like, shape);
  } catch (const std::exception&) {
    fail(std::string(op) + ": out of memory on cpu allocating a tensor of " + shape_text(like) +
         " " + dtype_name(like.scalar_type()));
  }
}

Tensor jagged_softmax(Tensor x, Tensor offsets, double scale) {
  const JaggedSoftmaxSizes sizes = parse_jagged_softmax(x, offsets);
  const auto sequences = read_sequences("jagged_softmax", "offsets", offsets, sizes.total);
  x = softmax_rows("jagged_softmax", x);
  Tensor out = allocate_contiguous("jagged_softmax", x);
  const KernelTable& table = kernel_table();

  SoftmaxParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.x_row_stride = softmax_row_stride(x, sizes.columns);
  params.out = out.mutable_data_ptr();
  params.columns = sizes.columns;
  params.scale = scale;
  zero_rows_outside(sequences, sizes.total, sizes.columns * element_bytes(params.element),
                    params.out);
  run_softmax(params, sequences, table);
  record_kernel(table.name);
  return out;
}

Tensor jagged_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets, double scale) {
  const JaggedSoftmaxSizes sizes = parse_jagged_softmax_backward(grad_out, out, offsets);
  const auto sequences = read_sequences("jagged_softmax_backward", "offsets", offsets, sizes.total);
  grad_out = softmax_rows("jagged_softmax_backward", grad_out);
  out = softmax_rows("jagged_softmax_backward", out);
  Tensor grad_in = allocate_contiguous("jagged_softmax_backward", out);
  const KernelTable& table = kernel_table();

  SoftmaxParams params{};
  params.element = element_of(out);
  params.backward = true;
  params.x = out.const_data_ptr();
  params.x_row_stride = softmax_row_stride(out, sizes.columns);
  params.grad_out = grad_out.const_data_ptr();
  params.grad_row_stride = softmax_row_stride(grad_out, sizes.columns);
  params.out = grad_in.mutable_data_ptr();
  params.columns = sizes.columns;
  params.scale = scale;
  zero_rows_outside(sequences, sizes.total, sizes.columns * element_bytes(params.element),
                    params.out);
  run_softmax(params, sequences, table);
  record_kernel(table.name);
  return grad_in;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_softmax", TORCH_BOX(&jagged_cuda::cpu::jagged_softmax));
  m.impl("jagged_softmax_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_softmax_backward));
}
