// jagged_dense_mul on the CPU (dense_rows.h: items), and the gradient of its dense operand, whose
// items are sequences.
#include <torch/csrc/stable/library.h>

#include "cpu/dense_rows.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_dense_mul(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_mul";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  return combine_with_dense(op, x, y, offsets, sizes, false, combine_floats(x, Combine::kMultiply));
}

Tensor jagged_dense_mul_backward(Tensor grad_out, Tensor x, Tensor offsets, int64_t max_len) {
  constexpr const char* op = "jagged_dense_mul_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, offsets, max_len});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  grad_out = as_contiguous(op, grad_out, 1);
  x = as_contiguous(op, x, 1);
  Tensor grad_y = allocate(op, x, with_rows_of(x, 1, {sizes.B, max_len}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const RowsPair whole{static_cast<const char*>(grad_out.const_data_ptr()),
                       static_cast<const char*>(x.const_data_ptr()),
                       static_cast<char*>(grad_y.mutable_data_ptr()),
                       grad_out.stride(0) * elem_bytes, x.stride(0) * elem_bytes};
  const auto multiply = combine_floats(x, Combine::kMultiply);

  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B && row_bytes > 0; ++seq) {
    items.add(seq, max_len * row_bytes * 2 * kByteCost);
  }
  items.run(0, [&](int64_t seq, void*) {
    const Sequence& sequence = sequences[static_cast<size_t>(seq)];
    char* out = whole.out + seq * max_len * row_bytes;
    const int64_t rows = std::min(sequence.len, max_len);
    combine_rows({whole.x + sequence.begin * whole.x_bytes,
                  whole.y + sequence.begin * whole.y_bytes, out, whole.x_bytes, whole.y_bytes},
                 rows, row_bytes, sizes.rest, multiply);
    std::memset(out + rows * row_bytes, 0, static_cast<size_t>((max_len - rows) * row_bytes));
  });
  record_kernel(kernel_table().name);
  return grad_y;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_mul", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_mul));
  m.impl("jagged_dense_mul_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_mul_backward));
}
