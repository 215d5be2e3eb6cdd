// jagged_dense_mul on the CPU (dense_rows.h: items), and its gradients.
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

std::tuple<Tensor, Tensor> jagged_dense_mul_backward(Tensor grad_out, Tensor x, Tensor y,
                                                     const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_mul_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  grad_out = as_contiguous(op, grad_out, 1);
  x = as_contiguous(op, x, 1);
  y = as_contiguous(op, y, 2);
  const int64_t max_len = sizes.M;
  Tensor grad_y = allocate(op, x, with_rows_of(x, 1, {sizes.B, max_len}));
  Tensor grad_x = allocate(op, x, with_rows_of(x, 1, {sizes.T}));
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const int64_t row_bytes = sizes.rest * elem_bytes;
  const int64_t grad_bytes = grad_out.stride(0) * elem_bytes, x_bytes = x.stride(0) * elem_bytes;
  const char* grad_rows = static_cast<const char*>(grad_out.const_data_ptr());
  const char* x_rows = static_cast<const char*>(x.const_data_ptr());
  char* grad_x_rows = static_cast<char*>(grad_x.mutable_data_ptr());
  char* grad_y_rows = static_cast<char*>(grad_y.mutable_data_ptr());
  const auto multiply = combine_floats(x, Combine::kMultiply);
  zero_rows_outside(sequences, sizes.T, row_bytes, grad_x_rows);
  run_sequences(sequences, max_len, row_bytes, [&](int64_t seq, const Sequence& sequence) {
    const int64_t both = std::min(sequence.len, max_len);
    const char* grad = grad_rows + sequence.begin * grad_bytes;
    // The products with `other`, and zeros up to `all` rows.
    const auto fill = [&](char* out, const char* other, int64_t other_bytes, int64_t all) {
      combine_rows({grad, other, out, grad_bytes, other_bytes}, both, row_bytes, sizes.rest,
                   multiply);
      std::memset(out + both * row_bytes, 0, static_cast<size_t>((all - both) * row_bytes));
    };
    fill(grad_y_rows + seq * max_len * row_bytes, x_rows + sequence.begin * x_bytes, x_bytes,
         max_len);
    const char* dense = static_cast<const char*>(y.const_data_ptr());
    fill(grad_x_rows + sequence.begin * row_bytes, dense + seq * y.stride(0) * elem_bytes,
         y.stride(1) * elem_bytes, sequence.len);
  });
  return {grad_x, grad_y};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_mul", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_mul));
  m.impl("jagged_dense_mul_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_mul_backward));
}
