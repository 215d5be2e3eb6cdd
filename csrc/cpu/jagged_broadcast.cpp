// jagged_broadcast on the CPU: items are up to kItemRows rows of a sequence.
#include "contract/rows.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// Copies one row of `row_bytes` to `rows` rows: copies what is already there, twice as much each
// time.
void repeat_row(char* out, const char* row, int64_t row_bytes, int64_t rows) {
  std::memcpy(out, row, static_cast<size_t>(row_bytes));
  for (int64_t done = 1; done < rows;) {
    const int64_t more = std::min(done, rows - done);
    std::memcpy(out + done * row_bytes, out, static_cast<size_t>(more * row_bytes));
    done += more;
  }
}

Tensor jagged_broadcast(Tensor x, Tensor offsets, int64_t total) {
  constexpr const char* op = "jagged_broadcast";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, total});
  const auto sequences =
      read_sequences(op, "offsets", offsets, total, std::nullopt, RowsOf::kCapacity);
  x = as_contiguous(op, x, 1);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {total}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const int64_t x_row_bytes = x.stride(0) * elem_bytes;
  const char* source = static_cast<const char*>(x.const_data_ptr());
  char* result = static_cast<char*>(out.mutable_data_ptr());
  zero_rows_outside(sequences, total, row_bytes, result);

  constexpr int64_t kItemRows = 4096;
  struct Item {
    int64_t seq;
    int64_t begin, rows;  // of the whole tensor
  };
  WorkList<Item> items;
  for (int64_t seq = 0; seq < sizes.B && row_bytes > 0; ++seq) {
    const auto [begin, len] = sequences[static_cast<size_t>(seq)];
    for (int64_t row = 0; row < len; row += kItemRows) {
      const int64_t rows = std::min(kItemRows, len - row);
      items.add({seq, begin + row, rows}, rows * row_bytes * kByteCost);
    }
  }
  items.run(0, [&](const Item& item, void*) {
    repeat_row(result + item.begin * row_bytes, source + item.seq * x_row_bytes, row_bytes,
               item.rows);
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_broadcast", TORCH_BOX(&jagged_cuda::cpu::jagged_broadcast));
}
