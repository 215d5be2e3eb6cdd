// jagged_jagged_bmm on the CPU: items are parts of a sequence's result (kernels/bmm.inl). A
// sequence of more than kPartRows rows is summed in parts, which are then added in order.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/kernels.h"
#include "cpu/products.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// A long sequence: its result, and its partial sums [parts, D * N].
struct LongSequence {
  void* out;
  void* sums;
  int64_t parts;
};

}  // namespace

Tensor times_jagged(const char* op, Tensor x, Tensor y, const std::vector<Sequence>& sequences) {
  constexpr int64_t kPartRows = 4096;
  // A larger item is split over columns of the wider operand.
  constexpr int64_t kItemCost = 1 << 22;
  const int64_t x_columns = x.size(1), y_columns = y.size(1);
  x = as_contiguous(op, x, -1);
  y = as_contiguous(op, y, -1);
  Tensor out = allocate(op, x, {static_cast<int64_t>(sequences.size()), x_columns, y_columns});
  const KernelTable& table = kernel_table();

  JaggedBmmParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.y = y.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.y_row_stride = y.stride(0);
  params.x_columns = x_columns;
  params.y_columns = y_columns;

  const int64_t out_elems = x_columns * y_columns;
  const int64_t accumulator_bytes = params.element == Element::kDouble ? 8 : 4;
  int64_t num_parts = 0;
  for (const Sequence& sequence : sequences) {
    if (sequence.len > kPartRows) num_parts += (sequence.len + kPartRows - 1) / kPartRows;
  }
  const AlignedBuffer partial_sums(static_cast<size_t>(num_parts * out_elems * accumulator_bytes));

  WorkList<JaggedBmmItem> items;
  WorkList<LongSequence> long_sequences;
  const auto add_items = [&](int64_t begin, int64_t rows, void* result, bool is_accum) {
    const bool x_is_wide = x_columns > y_columns;
    const int64_t wide = x_is_wide ? x_columns : y_columns;
    const int64_t row_cost = rows * (out_elems / wide + 8);
    const int64_t step =
        row_cost * wide <= kItemCost
            ? wide
            : std::max(int64_t{64}, kItemCost / std::max<int64_t>(1, row_cost) / 64 * 64);
    for (int64_t j = 0; j < wide; j += step) {
      const int64_t end = std::min(wide, j + step);
      JaggedBmmItem item{begin, rows, 0, x_columns, 0, y_columns, result, is_accum};
      (x_is_wide ? item.x_begin : item.y_begin) = j;
      (x_is_wide ? item.x_end : item.y_end) = end;
      items.add(item, (row_cost + out_elems / wide + 8) * (end - j));
    }
  };
  char* sums = static_cast<char*>(partial_sums.data());
  for (size_t seq = 0; seq < sequences.size() && out_elems > 0; ++seq) {
    const auto [begin, len] = sequences[seq];
    void* result = static_cast<char*>(out.mutable_data_ptr()) +
                   static_cast<int64_t>(seq) * out_elems * element_bytes(params.element);
    if (len <= kPartRows) {
      add_items(begin, len, result, false);
      continue;
    }
    const int64_t parts = (len + kPartRows - 1) / kPartRows;
    long_sequences.add({result, sums, parts}, parts * out_elems);
    for (int64_t row = 0; row < len; row += kPartRows) {
      add_items(begin + row, std::min(kPartRows, len - row), sums, true);
      sums += out_elems * accumulator_bytes;
    }
  }

  const Kernels& kernels = table.of(params.element);
  items.run(
      scratch_bytes<JaggedBmmBuffers<double>>(params),
      [&](const JaggedBmmItem& item, void* scratch) { kernels.jagged_bmm(params, item, scratch); });
  long_sequences.run(0, [&](const LongSequence& sequence, void*) {
    kernels.sum_parts(params.element, sequence.out, sequence.sums, sequence.parts, out_elems);
  });
  record_kernel(table.name);
  return out;
}

namespace {

Tensor jagged_jagged_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32});
  return times_jagged(op, x, y, read_sequences(op, "offsets", offsets, sizes.T));
}

std::tuple<Tensor, Tensor> jagged_jagged_bmm_backward(const Tensor& grad_out, const Tensor& x,
                                                      const Tensor& y, const Tensor& offsets,
                                                      bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets, allow_tf32});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  Tensor grad_x = times_dense(op, y, grad_out, true, sequences);
  return {grad_x, times_dense(op, x, grad_out, false, sequences)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_jagged_bmm", TORCH_BOX(&jagged_cuda::cpu::jagged_jagged_bmm));
  m.impl("jagged_jagged_bmm_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_jagged_bmm_backward));
}
