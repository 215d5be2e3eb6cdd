// jagged2_softmax on the CPU, forward and backward. Over columns: items are rows of a matrix, about
// kItemElems elements of them (kernels/softmax_lines.inl). Over rows: up to kSoftmaxColumns columns
// of a matrix, as jagged_softmax takes them of a sequence (kernels/softmax.inl).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <limits>

#include "cpu/kernels.h"
#include "cpu/matrices.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

constexpr int64_t kItemElems = 8192;
constexpr int64_t kElementCost = 8;  // an exponential and the passes over memory, in multiply-adds
// No argument says how many rows and columns there are: offsets have no upper bound.
constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

void softmax_over_columns(const SoftmaxParams& params, const std::vector<Matrix>& matrices,
                          const Kernels& kernels, size_t scratch) {
  WorkList<SoftmaxLinesItem> items;
  for (const Matrix& matrix : matrices) {
    const int64_t len = matrix.columns.len;
    if (!matrix.fits || len == 0) continue;
    const int64_t step = std::max<int64_t>(1, kItemElems / len);
    for (int64_t row = 0; row < matrix.rows.len; row += step) {
      const int64_t lines = std::min(step, matrix.rows.len - row);
      items.add({matrix.begin + row * len, lines, len}, lines * (len + 16) * kElementCost);
    }
  }
  items.run(scratch, [&](const SoftmaxLinesItem& item, void* memory) {
    kernels.softmax_lines(params, item, memory);
  });
}

void softmax_over_rows(const SoftmaxParams& shared, const std::vector<Matrix>& matrices,
                       const Kernels& kernels, size_t scratch) {
  struct Item {
    size_t seq;
    int64_t column, columns;
  };
  WorkList<Item> items;
  for (size_t seq = 0; seq < matrices.size(); ++seq) {
    const Matrix& matrix = matrices[seq];
    if (!matrix.fits || matrix.rows.len == 0) continue;
    for (int64_t column = 0; column < matrix.columns.len; column += kSoftmaxColumns) {
      const int64_t columns = std::min(kSoftmaxColumns, matrix.columns.len - column);
      items.add({seq, column, columns}, matrix.rows.len * (columns + 8) * kElementCost);
    }
  }
  items.run(scratch, [&](const Item& item, void* memory) {
    const Matrix& matrix = matrices[item.seq];
    const int64_t begin_bytes = matrix.begin * element_bytes(shared.element);
    SoftmaxParams params = shared;
    params.x = static_cast<const char*>(shared.x) + begin_bytes;
    if (shared.backward) params.grad_out = static_cast<const char*>(shared.grad_out) + begin_bytes;
    params.out = static_cast<char*>(shared.out) + begin_bytes;
    params.x_row_stride = params.grad_row_stride = params.columns = matrix.columns.len;
    kernels.softmax(params, {0, matrix.rows.len, item.column, item.columns}, memory);
  });
}

// Both directions: `argument` is the input or the forward's result, `grad_out` null or given.
Tensor run(const char* op, const char* name, const Tensor& argument, const Tensor* grad_out,
           const Tensor& offsets, const std::optional<Tensor>& y_offsets,
           const Tensor& matrix_offsets, bool over_rows, double scale, const Sizes& sizes) {
  const auto matrices = read_matrices(op, name, offsets, y_offsets, matrix_offsets, kUnbounded,
                                      kUnbounded, sizes.elems);
  const Tensor x = as_contiguous(op, argument);
  const Tensor grad = grad_out ? as_contiguous(op, *grad_out) : x;
  Tensor out = allocate(op, x, {sizes.elems});
  SoftmaxParams params{};
  params.element = element_of(x);
  params.backward = grad_out != nullptr;
  params.x = x.const_data_ptr();
  params.grad_out = grad.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.scale = scale;
  const KernelTable& table = kernel_table();
  zero_elements_outside(matrix_offsets, sizes.elems, element_bytes(params.element), params.out);
  (over_rows ? softmax_over_rows : softmax_over_columns)(
      params, matrices, table.of(params.element),
      scratch_bytes<SoftmaxBuffers>(params.element, params));
  record_kernel(table.name);
  return out;
}

Tensor jagged2_softmax(Tensor a, Tensor offsets, std::optional<Tensor> y_offsets,
                       Tensor matrix_offsets, int64_t dim, double scale) {
  constexpr const char* op = "jagged2_softmax";
  static const Contract contract(op);
  const Sizes sizes = contract.check({a, offsets, y_offsets, matrix_offsets, dim, scale});
  return run(op, "a", a, nullptr, offsets, y_offsets, matrix_offsets, dim == -2, scale, sizes);
}

Tensor jagged2_softmax_backward(Tensor grad_out, Tensor out, Tensor offsets,
                                std::optional<Tensor> y_offsets, Tensor matrix_offsets, int64_t dim,
                                double scale) {
  constexpr const char* op = "jagged2_softmax_backward";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({grad_out, out, offsets, y_offsets, matrix_offsets, dim, scale});
  return run(op, "out", out, &grad_out, offsets, y_offsets, matrix_offsets, dim == -2, scale,
             sizes);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged2_softmax", TORCH_BOX(&jagged_cuda::cpu::jagged2_softmax));
  m.impl("jagged2_softmax_backward", TORCH_BOX(&jagged_cuda::cpu::jagged2_softmax_backward));
}
