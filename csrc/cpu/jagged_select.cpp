// jagged_select on the CPU: a scan of the rows.
#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Plan jagged_select(Tensor offsets, Tensor keep, int64_t total) {
  constexpr const char* op = "jagged_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, keep, total});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  keep = as_contiguous(op, keep);
  const bool* kept = keep.const_data_ptr<bool>();
  const int64_t capacity = plan_capacity(offsets.scalar_type(), total);
  Tensor index = allocate(op, offsets, {total}, ScalarType::Long);
  int64_t* rows = index.mutable_data_ptr<int64_t>();

  std::vector<int64_t> ends{0};
  for (const auto& [begin, len] : sequences) {
    int64_t end = ends.back();
    for (int64_t row = begin; row < begin + len; ++row) {
      if (!kept[row]) continue;
      if (end < capacity) rows[end] = row;
      ++end;
    }
    ends.push_back(end);
  }
  std::fill(rows + std::min(ends.back(), capacity), rows + total, -1);
  record_kernel(kernel_table().name);
  return {index, planned_offsets(op, offsets, ends, capacity)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_select", TORCH_BOX(&jagged_cuda::cpu::jagged_select));
}
