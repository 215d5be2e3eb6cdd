// Shared by jagged_sum and jagged_mean on the CPU: items are up to kSumRows rows and kSumColumns
// columns of a sequence (kernels/sum.inl). A longer sequence is summed in parts, and these in
// order.
#pragma once

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/contract.h"
#include "contract/last_kernel.h"
#include "contract/rows.h"

namespace jagged_cuda::cpu {

inline Tensor reduce_rows(const char* op, Tensor x, const Tensor& offsets, const Sizes& sizes,
                          bool mean) {
  struct Item {
    SumItem sum;
    int64_t seq;
    double divisor;
    int64_t parts;  // for which there is room from `sums` on, for a long sequence
    int64_t sums;
  };
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  x = as_contiguous(op, x, 1);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.B}));
  const KernelTable& table = kernel_table();
  SumParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.columns = sizes.rest;
  char* result = static_cast<char*>(out.mutable_data_ptr());

  // Time to read memory, in multiply-adds.
  constexpr int64_t kElementCost = 6;
  WorkList<Item> whole, parts, parted;
  int64_t num_sums = 0;
  for (int64_t seq = 0; seq < sizes.B; ++seq) {
    const auto [begin, len] = sequences[static_cast<size_t>(seq)];
    const double divisor = mean && len > 0 ? static_cast<double>(len) : 1.0;
    for (int64_t column = 0; column < sizes.rest; column += kSumColumns) {
      const int64_t columns = std::min(kSumColumns, sizes.rest - column);
      if (len <= kSumRows) {
        whole.add({{begin, len, column, columns}, seq, divisor, 1, 0},
                  (len + 4) * (columns + 4) * kElementCost);
        continue;
      }
      const int64_t first = num_sums;
      for (int64_t row = 0; row < len; row += kSumRows, num_sums += columns) {
        const int64_t rows = std::min(kSumRows, len - row);
        parts.add({{begin + row, rows, column, columns}, seq, divisor, 0, num_sums},
                  rows * columns * kElementCost);
      }
      const int64_t num_parts = (num_sums - first) / columns;
      parted.add({{begin, len, column, columns}, seq, divisor, num_parts, first},
                 num_parts * columns * kElementCost);
    }
  }

  const Kernels& kernels = table.of(params.element);
  const bool is_double = params.element == Element::kDouble;
  const int64_t sum_bytes = is_double ? 8 : 4;
  const size_t bytes = scratch_bytes<SumBuffers>(params.element, params);
  const AlignedBuffer sums(static_cast<size_t>(num_sums * sum_bytes));
  const auto sums_of = [&](const Item& item) {
    return static_cast<char*>(sums.data()) + item.sums * sum_bytes;
  };
  const auto result_of = [&](const Item& item) {
    const int64_t index = item.seq * sizes.rest + item.sum.column_begin;
    return result + index * element_bytes(params.element);
  };
  whole.run(bytes, [&](const Item& item, void* scratch) {
    kernels.sum_rows(params, item.sum, nullptr, result_of(item), item.divisor, scratch);
  });
  parts.run(bytes, [&](const Item& item, void* scratch) {
    kernels.sum_rows(params, item.sum, sums_of(item), nullptr, item.divisor, scratch);
  });
  parted.run(0, [&](const Item& item, void*) {
    kernels.store_sums(params, sums_of(item), item.parts, item.sum.columns, item.divisor,
                       result_of(item));
  });
  record_kernel(table.name);
  return out;
}

}  // namespace jagged_cuda::cpu
