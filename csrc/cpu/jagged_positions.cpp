// jagged_positions on the CPU: items are sequences.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_positions(const Tensor& offsets, const std::optional<Tensor>& targets, int64_t total,
                        bool from_end, int64_t same_targets) {
  constexpr const char* op = "jagged_positions";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, targets, total, from_end, same_targets});
  const auto sequences =
      read_sequences(op, "offsets", offsets, total, std::nullopt, RowsOf::kCapacity);
  const auto counts = read_counts(op, "targets", targets, same_targets, sizes.B);
  Tensor out = allocate(op, offsets, {total}, ScalarType::Int);
  int32_t* positions = out.mutable_data_ptr<int32_t>();
  zero_rows_outside(sequences, total, sizeof(int32_t), positions);

  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B; ++seq) {
    items.add(seq, sequences[static_cast<size_t>(seq)].len * kByteCost * 4);
  }
  items.run(0, [&](int64_t seq, void*) {
    const auto [begin, len] = sequences[static_cast<size_t>(seq)];
    const int64_t first_target = len - std::min(counts[static_cast<size_t>(seq)], len);
    for (int64_t row = 0; row < len; ++row) {
      const int64_t position = std::min(row, first_target);
      positions[begin + row] = static_cast<int32_t>(from_end ? first_target - position : position);
    }
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_positions", TORCH_BOX(&jagged_cuda::cpu::jagged_positions));
}
