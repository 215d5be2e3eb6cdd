// array_jagged_bmm_jagged_out on the CPU (kernels/bmm.inl). A_b y_b: items of up to kDenseRows rows
// of a matrix. A_b^T y_b: items of a matrix's columns, or of y's where those are more, summed over
// all rows.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/kernels.h"
#include "cpu/matrix_products.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

constexpr int64_t kItemCost = 1 << 22;  // a larger item is split over columns

struct Operands {
  const char* a;
  const char* y;
  char* out;  // [total, columns]
  Element element;
  int64_t elem_bytes;
  int64_t y_stride;
  int64_t columns;
};

void multiply(const Operands& operands, const std::vector<Matrix>& matrices,
              const Kernels& kernels) {
  struct Item {
    size_t seq;
    int64_t row, rows;  // of the matrix
  };
  int64_t max_inner = 0;
  WorkList<Item> items;
  for (size_t seq = 0; seq < matrices.size(); ++seq) {
    const Matrix& matrix = matrices[seq];
    const int64_t inner = matrix.fits ? matrix.columns.len : 0;
    max_inner = std::max(max_inner, inner);
    for (int64_t row = 0; row < matrix.rows.len; row += kDenseRows) {
      const int64_t rows = std::min(kDenseRows, matrix.rows.len - row);
      items.add({seq, row, rows}, (rows + 1) * (inner + 8) * (operands.columns + 8));
    }
  }

  DenseBmmParams shared{};
  shared.element = operands.element;
  shared.y_row_stride = operands.y_stride;
  shared.y_column_stride = 1;
  shared.inner = max_inner;
  shared.columns = operands.columns;
  items.run(scratch_bytes<DenseBmmBuffers<double>>(shared), [&](const Item& item, void* scratch) {
    const Matrix& matrix = matrices[item.seq];
    DenseBmmParams params = shared;
    params.inner = matrix.fits ? matrix.columns.len : 0;
    params.x_row_stride = matrix.columns.len;
    const int64_t first = matrix.fits ? matrix.begin + item.row * matrix.columns.len : 0;
    params.x = operands.a + first * operands.elem_bytes;
    params.y = operands.y + matrix.columns.begin * operands.y_stride * operands.elem_bytes;
    params.out =
        operands.out + (matrix.rows.begin + item.row) * operands.columns * operands.elem_bytes;
    kernels.dense_bmm(params, {0, 0, item.rows}, scratch);
  });
}

void multiply_transposed(const Operands& operands, const std::vector<Matrix>& matrices,
                         const Kernels& kernels) {
  struct Item {
    size_t seq;
    int64_t a_begin, a_end;  // columns of the matrix
    int64_t y_begin, y_end;  // columns of y
  };
  WorkList<Item> items;
  for (size_t seq = 0; seq < matrices.size(); ++seq) {
    const Matrix& matrix = matrices[seq];
    const int64_t a_columns = matrix.columns.len;
    if (a_columns == 0) continue;
    const bool a_is_wide = a_columns > operands.columns;
    const int64_t wide = a_is_wide ? a_columns : operands.columns;
    const int64_t narrow = a_is_wide ? operands.columns : a_columns;
    const int64_t cost = matrix.rows.len * (narrow + 8) + 8;  // of one column of the wider operand
    const int64_t step =
        cost * wide <= kItemCost ? wide : std::max(int64_t{64}, kItemCost / cost / 64 * 64);
    for (int64_t j = 0; j < wide; j += step) {
      const int64_t end = std::min(wide, j + step);
      Item item{seq, 0, a_columns, 0, operands.columns};
      (a_is_wide ? item.a_begin : item.y_begin) = j;
      (a_is_wide ? item.a_end : item.y_end) = end;
      items.add(item, cost * (end - j));
    }
  }

  JaggedBmmParams shared{};
  shared.element = operands.element;
  shared.y_row_stride = operands.y_stride;
  shared.y_columns = operands.columns;
  items.run(scratch_bytes<JaggedBmmBuffers<double>>(shared), [&](const Item& item, void* scratch) {
    const Matrix& matrix = matrices[item.seq];
    JaggedBmmParams params = shared;
    params.x_row_stride = params.x_columns = matrix.columns.len;
    params.x = operands.a + (matrix.fits ? matrix.begin : 0) * operands.elem_bytes;
    params.y = operands.y + matrix.rows.begin * operands.y_stride * operands.elem_bytes;
    void* out = operands.out + matrix.columns.begin * operands.columns * operands.elem_bytes;
    kernels.jagged_bmm(params,
                       {0, matrix.fits ? matrix.rows.len : 0, item.a_begin, item.a_end,
                        item.y_begin, item.y_end, out, false},
                       scratch);
  });
}

}  // namespace

Tensor times_matrices(const char* op, Tensor a, Tensor y, const std::vector<Matrix>& matrices,
                      int64_t total, bool transpose) {
  const int64_t columns = y.size(1);
  a = as_contiguous(op, a);
  y = as_contiguous(op, y, -1);
  Tensor out = allocate(op, a, {total, columns});

  Operands operands;
  operands.a = static_cast<const char*>(a.const_data_ptr());
  operands.y = static_cast<const char*>(y.const_data_ptr());
  operands.out = static_cast<char*>(out.mutable_data_ptr());
  operands.element = element_of(a);
  operands.elem_bytes = element_bytes(operands.element);
  operands.y_stride = y.stride(0);
  operands.columns = columns;
  std::vector<Sequence> result_rows(matrices.size());
  for (size_t seq = 0; seq < matrices.size(); ++seq) {
    result_rows[seq] = transpose ? matrices[seq].columns : matrices[seq].rows;
  }
  zero_rows_outside(result_rows, total, columns * operands.elem_bytes, operands.out);
  const KernelTable& table = kernel_table();
  if (columns > 0) {
    (transpose ? multiply_transposed : multiply)(operands, matrices, table.of(operands.element));
  }
  record_kernel(table.name);
  return out;
}

namespace {

// allow_tf32 changes nothing here: the CPU's products are always f32-accurate.
Tensor array_jagged_bmm_jagged_out(const Tensor& a, const Tensor& y, const Tensor& offsets,
                                   const std::optional<Tensor>& y_offsets,
                                   const Tensor& matrix_offsets, int64_t total, bool transpose,
                                   bool allow_tf32) {
  constexpr const char* op = "array_jagged_bmm_jagged_out";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({a, y, offsets, y_offsets, matrix_offsets, total, transpose, allow_tf32});
  const int64_t total_rows = transpose ? sizes.T : total,
                total_columns = transpose ? total : sizes.T;
  const auto matrices = read_matrices(op, "a", offsets, y_offsets, matrix_offsets, total_rows,
                                      total_columns, sizes.elems);
  return times_matrices(op, a, y, matrices, total, transpose);
}

std::tuple<Tensor, Tensor> array_jagged_bmm_jagged_out_backward(
    const Tensor& grad_out, const Tensor& a, const Tensor& y, const Tensor& offsets,
    const std::optional<Tensor>& y_offsets, const Tensor& matrix_offsets, bool transpose,
    bool allow_tf32) {
  constexpr const char* op = "array_jagged_bmm_jagged_out_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, a, y, offsets, y_offsets, matrix_offsets, transpose, allow_tf32});
  // The tensors whose sequences are the matrices' rows and columns.
  const Tensor &rows = transpose ? y : grad_out, &columns = transpose ? grad_out : y;
  const auto matrices = read_matrices(op, "a", offsets, y_offsets, matrix_offsets, rows.size(0),
                                      columns.size(0), sizes.elems);
  Tensor grad_a = times_rows(op, rows, columns, matrix_offsets, matrices, sizes.elems);
  return {grad_a, times_matrices(op, a, grad_out, matrices, sizes.Ty, !transpose)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("array_jagged_bmm_jagged_out", TORCH_BOX(&jagged_cuda::cpu::array_jagged_bmm_jagged_out));
  m.impl("array_jagged_bmm_jagged_out_backward",
         TORCH_BOX(&jagged_cuda::cpu::array_jagged_bmm_jagged_out_backward));
}
