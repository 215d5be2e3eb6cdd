// jagged_slice on the CPU: items are sequences.
#include <torch/csrc/stable/library.h>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

// [B] int32 or int64, or `otherwise` for each sequence.
std::vector<int64_t> numbers(const std::optional<Tensor>& given, int64_t num_seqs,
                             int64_t otherwise) {
  std::vector<int64_t> values(static_cast<size_t>(num_seqs), otherwise);
  if (!given) return values;
  const Tensor dense = contiguous(*given);
  if (dense.scalar_type() == ScalarType::Int) {
    std::copy_n(dense.const_data_ptr<int32_t>(), num_seqs, values.begin());
  } else {
    std::copy_n(dense.const_data_ptr<int64_t>(), num_seqs, values.begin());
  }
  return values;
}

Plan jagged_slice(Tensor offsets, std::optional<Tensor> begin, std::optional<Tensor> length,
                  int64_t rows, int64_t total, int64_t skip, std::optional<int64_t> most,
                  bool from_end, int64_t function) {
  constexpr const char* op = "jagged_slice";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({offsets, begin, length, rows, total, skip, most, from_end, function});
  const char* asked = kSliceFunctions[function];
  auto ranges = read_sequences(asked, "offsets", offsets, rows);
  const auto begins = numbers(begin, sizes.B, 0), lengths = numbers(length, sizes.B, rows);
  const int64_t longest = most.value_or(rows);
  for (size_t seq = 0; seq < ranges.size(); ++seq) {
    Sequence& range = ranges[seq];
    const int64_t first =
        std::min(range.len, std::clamp<int64_t>(begins[seq], 0, rows) + std::min(skip, rows));
    const int64_t len = std::min({range.len - first, std::max<int64_t>(0, lengths[seq]), longest});
    range = {range.begin + (from_end ? range.len - first - len : first), len};
  }
  record_kernel(kernel_table().name);
  return plan_ranges(asked, offsets, ranges, total);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_slice", TORCH_BOX(&jagged_cuda::cpu::jagged_slice));
}
