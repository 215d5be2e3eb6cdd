// jagged_index_select on the CPU: items are the sequences of the result.
#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Plan jagged_index_select(Tensor offsets, Tensor index, int64_t rows, int64_t total,
                         int64_t function) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, index, rows, total, function});
  const char* asked = kIndexSelectFunctions[function];
  const auto sequences = read_sequences(asked, "offsets", offsets, rows);
  const Tensor dense = as_contiguous(op, index);
  const int64_t* chosen = dense.const_data_ptr<int64_t>();
  enforce(asked, "index", IndexRule{chosen, sizes.N, sizes.B});
  std::vector<Sequence> ranges(static_cast<size_t>(sizes.N));
  for (size_t i = 0; i < ranges.size(); ++i) ranges[i] = sequences[static_cast<size_t>(chosen[i])];
  record_kernel(kernel_table().name);
  return plan_ranges(asked, offsets, ranges, total);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_index_select", TORCH_BOX(&jagged_cuda::cpu::jagged_index_select));
}
