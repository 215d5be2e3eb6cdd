// matrix_offsets on the CPU.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// Unsigned: with wrong offsets sums may pass 2^63.
template <class Offset>
uint64_t length(const Tensor& offsets, int64_t seq) {
  const Offset* bounds = offsets.const_data_ptr<Offset>();
  const int64_t begin = bounds[seq], end = bounds[seq + 1];
  return end > begin ? static_cast<uint64_t>(end) - static_cast<uint64_t>(begin) : 0;
}

template <class Offset>
void add_up(const Tensor& rows, const Tensor& columns, int64_t num_seqs, int64_t* out) {
  uint64_t sum = 0;
  out[0] = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    sum += length<Offset>(rows, seq) * length<Offset>(columns, seq);
    out[seq + 1] = static_cast<int64_t>(sum);
  }
}

Tensor matrix_offsets(const Tensor& offsets, const std::optional<Tensor>& y_offsets) {
  constexpr const char* op = "matrix_offsets";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, y_offsets});
  const Tensor rows = as_contiguous(op, offsets);
  const Tensor columns = y_offsets ? as_contiguous(op, *y_offsets) : rows;
  Tensor out = allocate(op, offsets, {sizes.B + 1}, ScalarType::Long);
  int64_t* sums = out.mutable_data_ptr<int64_t>();
  if (offsets.scalar_type() == ScalarType::Int) {
    add_up<int32_t>(rows, columns, sizes.B, sums);
  } else {
    add_up<int64_t>(rows, columns, sizes.B, sums);
  }
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("matrix_offsets", TORCH_BOX(&jagged_cuda::cpu::matrix_offsets));
}
