// jagged_take and the inverse of its index on the CPU: items are up to kItemRows rows.
#include "contract/rows.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_take(Tensor x, Tensor index, bool unique, std::optional<Tensor> chosen,
                   std::optional<Tensor> source, std::optional<Tensor> taken) {
  constexpr const char* op = "jagged_take";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, index, unique, chosen, source, taken});
  const Tensor dense = as_contiguous(op, index);
  const int64_t* rows = dense.const_data_ptr<int64_t>();
  Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.N}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  char* result = static_cast<char*>(out.mutable_data_ptr());
  x = as_contiguous(op, x, 1);
  const char* source_rows = static_cast<const char*>(x.const_data_ptr());
  const int64_t stride = x.size(0) > 1 ? x.stride(0) * elem_bytes : row_bytes;

  WorkList<int64_t> items;
  constexpr int64_t kItemRows = 1024;
  for (int64_t begin = 0; begin < sizes.N && row_bytes > 0; begin += kItemRows) {
    items.add(begin, std::min(kItemRows, sizes.N - begin) * row_bytes * kByteCost);
  }
  items.run(0, [&](int64_t begin, void*) {
    const int64_t end = std::min(begin + kItemRows, sizes.N);
    for (int64_t row = begin; row < end;) {
      const int64_t from = rows[row];
      int64_t run = row + 1;  // rows that follow one another in both are copied together
      char* to = result + row * row_bytes;
      if (from < 0 || from >= sizes.T) {
        while (run < end && (rows[run] < 0 || rows[run] >= sizes.T)) ++run;
        std::memset(to, 0, static_cast<size_t>((run - row) * row_bytes));
      } else {
        while (run < end && rows[run] == from + (run - row) && rows[run] < sizes.T) ++run;
        copy_rows(to, source_rows + from * stride, run - row, row_bytes, stride);
      }
      row = run;
    }
  });
  record_kernel(kernel_table().name);
  return out;
}

// Which row of the result each of `total` rows went to, -1 for none.
Tensor jagged_take_backward(Tensor index, int64_t total) {
  constexpr const char* op = "jagged_take_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({index, total});
  const Tensor dense = as_contiguous(op, index);
  const int64_t* rows = dense.const_data_ptr<int64_t>();
  Tensor inverse = allocate(op, index, {total});
  int64_t* places = inverse.mutable_data_ptr<int64_t>();
  std::fill_n(places, total, -1);
  for (int64_t row = 0; row < sizes.N; ++row) {
    if (rows[row] >= 0 && rows[row] < total) places[rows[row]] = row;
  }
  record_kernel(kernel_table().name);
  return inverse;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_take", TORCH_BOX(&jagged_cuda::cpu::jagged_take));
  m.impl("jagged_take_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_take_backward));
}
