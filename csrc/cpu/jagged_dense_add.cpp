// jagged_dense_add on the CPU (dense_rows.h: items), and its gradients. Integers wrap around, as torch's do; of bools
// one that is true makes the sum true.
#include <torch/csrc/stable/library.h>

#include "cpu/dense_rows.h"

namespace jagged_cuda::cpu {
namespace {

template <class Bits>
void add_bits(const void* x, const void* y, void* out, int64_t count) {
  const Bits *a = static_cast<const Bits*>(x), *b = static_cast<const Bits*>(y);
  Bits* sum = static_cast<Bits*>(out);
  for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<Bits>(a[i] + b[i]);
}

void add_bools(const void* x, const void* y, void* out, int64_t count) {
  const uint8_t *a = static_cast<const uint8_t*>(x), *b = static_cast<const uint8_t*>(y);
  uint8_t* sum = static_cast<uint8_t*>(out);
  for (int64_t i = 0; i < count; ++i) sum[i] = a[i] | b[i];
}

Tensor jagged_dense_add(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_add";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  const auto run = [&](const auto& combine) {
    return combine_with_dense(op, x, y, offsets, sizes, true, combine);
  };
  switch (x.scalar_type()) {
    case ScalarType::Bool:
      return run(add_bools);
    case ScalarType::Char:
    case ScalarType::Byte:
      return run(add_bits<uint8_t>);
    case ScalarType::Short:
      return run(add_bits<uint16_t>);
    case ScalarType::Int:
      return run(add_bits<uint32_t>);
    case ScalarType::Long:
      return run(add_bits<uint64_t>);
    default:
      return run(combine_floats(x, Combine::kAdd));
  }
}

std::tuple<Tensor, Tensor> jagged_dense_add_backward(Tensor grad_out, const Tensor& offsets,
                                                     int64_t max_len) {
  constexpr const char* op = "jagged_dense_add_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, max_len});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  grad_out = as_contiguous(op, grad_out, 1);
  Tensor grad_x = allocate(op, grad_out, with_rows_of(grad_out, 1, {sizes.T}));
  Tensor grad_y = allocate(op, grad_out, with_rows_of(grad_out, 1, {sizes.B, max_len}));
  const int64_t elem_bytes = static_cast<int64_t>(grad_out.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes, grad_bytes = grad_out.stride(0) * elem_bytes;
  const char* grad = static_cast<const char*>(grad_out.const_data_ptr());
  char* x_rows = static_cast<char*>(grad_x.mutable_data_ptr());
  char* y_rows = static_cast<char*>(grad_y.mutable_data_ptr());
  zero_rows_outside(sequences, sizes.T, row_bytes, x_rows);
  run_sequences(sequences, max_len, row_bytes, [&](int64_t seq, const Sequence& sequence) {
    const char* from = grad + sequence.begin * grad_bytes;
    char* to = y_rows + seq * max_len * row_bytes;
    const int64_t rows = std::min(sequence.len, max_len);
    copy_rows(x_rows + sequence.begin * row_bytes, from, sequence.len, row_bytes, grad_bytes);
    copy_rows(to, from, rows, row_bytes, grad_bytes);
    std::memset(to + rows * row_bytes, 0, static_cast<size_t>((max_len - rows) * row_bytes));
  });
  return {grad_x, grad_y};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_add", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_add));
  m.impl("jagged_dense_add_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_add_backward));
}
