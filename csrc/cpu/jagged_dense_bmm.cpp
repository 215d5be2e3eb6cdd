// jagged_dense_bmm on the CPU: items of up to kDenseRows rows of one sequence (kernels/bmm.inl).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// allow_tf32 changes nothing here: the CPU's products are always f32-accurate.
Tensor jagged_dense_bmm(Tensor x, Tensor y, Tensor offsets, bool allow_tf32,
                        std::optional<Tensor> bias, int64_t activation) {
  constexpr const char* op = "jagged_dense_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32, bias, activation});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  x = as_contiguous(op, x, -1);
  // The backward pass gives y transposed: either of its last dimensions may be the contiguous one.
  if (sizes.N > 1 && y.stride(2) != 1 && sizes.D > 1 && y.stride(1) != 1) {
    y = contiguous_copy(op, y);
  }
  Tensor out = allocate(op, x, {sizes.T, sizes.N});
  const KernelTable& table = kernel_table();

  DenseBmmParams params{};
  params.element = element_of(x);
  params.x = x.const_data_ptr();
  params.x_row_stride = x.stride(0);
  params.y = y.const_data_ptr();
  params.y_seq_stride = y.stride(0);
  params.y_row_stride = y.stride(1);
  params.y_column_stride = y.stride(2);
  params.out = out.mutable_data_ptr();
  params.inner = sizes.D;
  params.columns = sizes.N;
  if (bias) {
    bias = as_contiguous(op, *bias, -1);
    params.bias = bias->const_data_ptr();
    params.bias_stride = bias->stride(0);
  }
  params.activation = static_cast<Activation>(activation);
  zero_rows_outside(sequences, sizes.T, sizes.N * element_bytes(params.element), params.out);

  WorkList<DenseBmmItem> items;
  for (size_t seq = 0; seq < sequences.size() && sizes.N > 0; ++seq) {
    const auto [begin, len] = sequences[seq];
    for (int64_t row = 0; row < len; row += kDenseRows) {
      const int64_t rows = std::min(kDenseRows, len - row);
      items.add({static_cast<int64_t>(seq), begin + row, rows},
                (rows + 1) * (sizes.D + 8) * (sizes.N + 8));
    }
  }
  const auto compute = table.of(params.element).dense_bmm;
  items.run(scratch_bytes<DenseBmmBuffers<double>>(params),
            [&](const DenseBmmItem& item, void* scratch) { compute(params, item, scratch); });
  record_kernel(table.name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_bmm", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_bmm));
}
