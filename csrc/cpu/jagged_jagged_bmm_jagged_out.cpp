// jagged_jagged_bmm_jagged_out on the CPU: items of up to kDenseRows rows of one matrix. Each is a
// product of rows of x with y_b transposed, which kernels/bmm.inl packs.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/kernels.h"
#include "cpu/matrix_products.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {

Tensor times_rows(const char* op, Tensor x, Tensor y, const Tensor& matrix_offsets,
                  const std::vector<Matrix>& matrices, int64_t total_out) {
  struct Item {
    size_t seq;
    int64_t row, rows;  // of the matrix
  };
  x = as_contiguous(op, x, -1);
  y = as_contiguous(op, y, -1);
  Tensor out = allocate(op, x, {total_out});
  const Element element = element_of(x);
  const int64_t elem_bytes = element_bytes(element);
  zero_elements_outside(matrix_offsets, total_out, elem_bytes, out.mutable_data_ptr());

  int64_t max_columns = 0;
  WorkList<Item> items;
  for (size_t seq = 0; seq < matrices.size(); ++seq) {
    const Matrix& matrix = matrices[seq];
    if (!matrix.fits || matrix.columns.len == 0) continue;
    max_columns = std::max(max_columns, matrix.columns.len);
    for (int64_t row = 0; row < matrix.rows.len; row += kDenseRows) {
      const int64_t rows = std::min(kDenseRows, matrix.rows.len - row);
      items.add({seq, row, rows}, (rows + 1) * (x.size(1) + 8) * (matrix.columns.len + 8));
    }
  }

  DenseBmmParams shared{};
  shared.element = element;
  shared.x_row_stride = x.stride(0);
  shared.y_row_stride = 1;
  shared.y_column_stride = y.stride(0);
  shared.inner = x.size(1);
  shared.columns = max_columns;
  const char* x_rows = static_cast<const char*>(x.const_data_ptr());
  const char* y_rows = static_cast<const char*>(y.const_data_ptr());
  char* elements = static_cast<char*>(out.mutable_data_ptr());
  const KernelTable& table = kernel_table();
  const auto compute = table.of(element).dense_bmm;
  items.run(scratch_bytes<DenseBmmBuffers<double>>(shared), [&](const Item& item, void* scratch) {
    const Matrix& matrix = matrices[item.seq];
    DenseBmmParams params = shared;
    params.x = x_rows + (matrix.rows.begin + item.row) * shared.x_row_stride * elem_bytes;
    params.y = y_rows + matrix.columns.begin * shared.y_column_stride * elem_bytes;
    params.columns = matrix.columns.len;
    params.out = elements + (matrix.begin + item.row * params.columns) * elem_bytes;
    compute(params, {0, 0, item.rows}, scratch);
  });
  record_kernel(table.name);
  return out;
}

namespace {

// allow_tf32 changes nothing here: the CPU's products are always f32-accurate.
Tensor jagged_jagged_bmm_jagged_out(const Tensor& x, const Tensor& y, const Tensor& offsets,
                                    const std::optional<Tensor>& y_offsets,
                                    const Tensor& matrix_offsets, int64_t total_out,
                                    bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_jagged_out";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({x, y, offsets, y_offsets, matrix_offsets, total_out, allow_tf32});
  const auto matrices = read_matrices(op, "total_out", offsets, y_offsets, matrix_offsets, sizes.Tx,
                                      sizes.Ty, total_out);
  return times_rows(op, x, y, matrix_offsets, matrices, total_out);
}

std::tuple<Tensor, Tensor> jagged_jagged_bmm_jagged_out_backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& y, const Tensor& offsets,
    const std::optional<Tensor>& y_offsets, const Tensor& matrix_offsets, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_jagged_out_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, x, y, offsets, y_offsets, matrix_offsets, allow_tf32});
  const auto matrices = read_matrices(op, "grad_out", offsets, y_offsets, matrix_offsets, sizes.Tx,
                                      sizes.Ty, sizes.elems);
  Tensor grad_x = times_matrices(op, grad_out, y, matrices, sizes.Tx, false);
  return {grad_x, times_matrices(op, grad_out, x, matrices, sizes.Ty, true)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_jagged_bmm_jagged_out",
         TORCH_BOX(&jagged_cuda::cpu::jagged_jagged_bmm_jagged_out));
  m.impl("jagged_jagged_bmm_jagged_out_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_jagged_bmm_jagged_out_backward));
}
