// jagged_dense_bmm on the CPU: items of up to kDenseRows rows of one sequence (kernels/bmm.inl).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/kernels.h"
#include "cpu/products.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {

Tensor times_dense(const char* op, Tensor x, Tensor y, bool transposed,
                   const std::vector<Sequence>& sequences, std::optional<Tensor> bias,
                   int64_t activation) {
  const int64_t along_inner = transposed ? 2 : 1, along_columns = transposed ? 1 : 2,
                total = x.size(0), inner = y.size(along_inner), columns = y.size(along_columns);
  x = as_contiguous(op, x, -1);
  // Either of the last dimensions of y may be the contiguous one.
  if (y.size(2) > 1 && y.stride(2) != 1 && y.size(1) > 1 && y.stride(1) != 1) {
    y = contiguous_copy(op, y);
  }
  Tensor out = allocate(op, x, {total, columns});
  const KernelTable& table = kernel_table();

  DenseBmmParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.y = y.const_data_ptr();
  params.y_seq_stride = y.stride(0);
  params.y_row_stride = y.stride(along_inner);
  params.y_column_stride = y.stride(along_columns);
  params.out = out.mutable_data_ptr();
  params.inner = inner;
  params.columns = columns;
  if (bias) {
    bias = as_contiguous(op, *bias, -1);
    params.bias = bias->const_data_ptr();
    params.bias_stride = bias->stride(0);
  }
  params.activation = static_cast<Activation>(activation);
  zero_rows_outside(sequences, total, columns * element_bytes(params.element), params.out);

  WorkList<DenseBmmItem> items;
  for (size_t seq = 0; seq < sequences.size() && columns > 0; ++seq) {
    const auto [begin, len] = sequences[seq];
    for (int64_t row = 0; row < len; row += kDenseRows) {
      const int64_t rows = std::min(kDenseRows, len - row);
      items.add({static_cast<int64_t>(seq), begin + row, rows},
                (rows + 1) * (inner + 8) * (columns + 8));
    }
  }
  const auto compute = table.of(params.element).dense_bmm;
  items.run(scratch_bytes<DenseBmmBuffers<double>>(params),
            [&](const DenseBmmItem& item, void* scratch) { compute(params, item, scratch); });
  record_kernel(table.name);
  return out;
}

namespace {

// allow_tf32 changes nothing here: the CPU's products are always f32-accurate.
Tensor jagged_dense_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32,
                        const std::optional<Tensor>& bias, int64_t activation) {
  constexpr const char* op = "jagged_dense_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32, bias, activation});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  return times_dense(op, x, y, false, sequences, bias, activation);
}

std::tuple<Tensor, Tensor> jagged_dense_bmm_backward(const Tensor& grad_out, const Tensor& x,
                                                     const Tensor& y, const Tensor& offsets,
                                                     bool allow_tf32) {
  constexpr const char* op = "jagged_dense_bmm_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets, allow_tf32});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  Tensor grad_x = times_dense(op, grad_out, y, true, sequences);
  return {grad_x, times_jagged(op, x, grad_out, sequences)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_bmm", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_bmm));
  m.impl("jagged_dense_bmm_backward", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_bmm_backward));
}
