// padded_to_jagged on the CPU: items are sequences.
#include "contract/rows.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Tensor padded_to_jagged(Tensor x, Tensor offsets, int64_t total) {
  constexpr const char* op = "padded_to_jagged";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, total});
  const auto sequences =
      read_sequences(op, "offsets", offsets, total, std::nullopt, RowsOf::kCapacity);
  x = as_contiguous(op, x, 2);
  Tensor out = allocate(op, x, with_rows_of(x, 2, {total}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const int64_t x_seq_bytes = x.stride(0) * elem_bytes, x_row_bytes = x.stride(1) * elem_bytes;
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* result = static_cast<char*>(out.mutable_data_ptr());
  zero_rows_outside(sequences, total, row_bytes, result);

  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B && row_bytes > 0; ++seq) {
    items.add(seq, sequences[static_cast<size_t>(seq)].len * row_bytes * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) {
    const Sequence& sequence = sequences[static_cast<size_t>(seq)];
    const char* from = source + seq * x_seq_bytes;
    char* to = result + sequence.begin * row_bytes;
    const int64_t rows = std::min(sequence.len, sizes.M);
    copy_rows(to, from, rows, row_bytes, x_row_bytes);
    std::memset(to + rows * row_bytes, 0, static_cast<size_t>((sequence.len - rows) * row_bytes));
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("padded_to_jagged", TORCH_BOX(&jagged_cuda::cpu::padded_to_jagged));
}
