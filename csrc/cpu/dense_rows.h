// Shared by jagged_dense_add and jagged_dense_mul on the CPU: items are up to kItemRows rows of a
// sequence, beside the padded rows at the same places. Of their gradients items are sequences.
#pragma once

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/contract.h"
#include "contract/last_kernel.h"
#include "contract/rows.h"

#include <cstring>

namespace jagged_cuda::cpu {

// Rows of x and y that lie so many bytes apart, combined into contiguous ones.
struct RowsPair {
  const char* x;
  const char* y;
  char* out;
  int64_t x_bytes, y_bytes;
};

// Calls combine(x, y, out, elements) for the rows: for all at once where they are contiguous.
template <class CombineRun>
void combine_rows(const RowsPair& pair, int64_t rows, int64_t row_bytes, int64_t row_elems,
                  const CombineRun& combine) {
  if (pair.x_bytes == row_bytes && pair.y_bytes == row_bytes) {
    combine(pair.x, pair.y, pair.out, rows * row_elems);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    combine(pair.x + row * pair.x_bytes, pair.y + row * pair.y_bytes, pair.out + row * row_bytes,
            row_elems);
  }
}

// combine(x, y, out, elements) says how x [T, ...] and y [B, M, ...] give a row of the result.
// Rows of a sequence from M on are those of x if `keeps_x`, else 0.
template <class CombineRun>
Tensor combine_with_dense(const char* op, Tensor x, Tensor y, const Tensor& offsets,
                          const Sizes& sizes, bool keeps_x, const CombineRun& combine) {
  struct Item {
    int64_t seq;
    int64_t row, rows;  // within the sequence
  };
  constexpr int64_t kItemRows = 4096;
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  x = as_contiguous(op, x, 1);
  y = as_contiguous(op, y, 2);
  Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.T}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const int64_t y_seq_bytes = y.stride(0) * elem_bytes;
  const RowsPair whole{static_cast<const char*>(x.const_data_ptr()),
                       static_cast<const char*>(y.const_data_ptr()),
                       static_cast<char*>(out.mutable_data_ptr()), x.stride(0) * elem_bytes,
                       y.stride(1) * elem_bytes};
  zero_rows_outside(sequences, sizes.T, row_bytes, whole.out);

  WorkList<Item> items;
  for (int64_t seq = 0; seq < sizes.B && row_bytes > 0; ++seq) {
    const int64_t len = sequences[static_cast<size_t>(seq)].len;
    for (int64_t row = 0; row < len; row += kItemRows) {
      const int64_t rows = std::min(kItemRows, len - row);
      items.add({seq, row, rows}, rows * row_bytes * 2 * kByteCost);
    }
  }
  items.run(0, [&](const Item& item, void*) {
    const int64_t first = sequences[static_cast<size_t>(item.seq)].begin + item.row;
    const int64_t both = std::clamp<int64_t>(sizes.M - item.row, 0, item.rows);
    const char* x_rows = whole.x + first * whole.x_bytes;
    char* out_rows = whole.out + first * row_bytes;
    if (both > 0) {
      const char* y_rows = whole.y + item.seq * y_seq_bytes + item.row * whole.y_bytes;
      combine_rows({x_rows, y_rows, out_rows, whole.x_bytes, whole.y_bytes}, both, row_bytes,
                   sizes.rest, combine);
    }
    const int64_t left = item.rows - both;
    if (keeps_x) {
      copy_rows(out_rows + both * row_bytes, x_rows + both * whole.x_bytes, left, row_bytes,
                whole.x_bytes);
    } else {
      std::memset(out_rows + both * row_bytes, 0, static_cast<size_t>(left * row_bytes));
    }
  });
  record_kernel(kernel_table().name);
  return out;
}

// Calls run(number, sequence) for each sequence: for gradients, of which one is padded to max_len.
template <class Run>
void run_sequences(const std::vector<Sequence>& sequences, int64_t max_len, int64_t row_bytes,
                   const Run& run) {
  WorkList<int64_t> items;
  for (size_t seq = 0; seq < sequences.size() && row_bytes > 0; ++seq) {
    const int64_t rows = std::max(sequences[seq].len, max_len);
    items.add(static_cast<int64_t>(seq), rows * row_bytes * 2 * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) { run(seq, sequences[static_cast<size_t>(seq)]); });
  record_kernel(kernel_table().name);
}

// The kernel for floating elements, as combine(x, y, out, elements).
inline auto combine_floats(const Tensor& x, Combine how) {
  const Element element = element_of(x);
  const auto kernel = kernel_table().of(element).combine_elements;
  return [=](const void* a, const void* b, void* out, int64_t count) {
    kernel(element, how, a, b, out, count);
  };
}

}  // namespace jagged_cuda::cpu
