// jagged_sessionize on the CPU: items are sequences, whose sessions are counted, and then written
// where the sum of the counts before says.
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "contract/checks.h"
#include "cpu/kernels.h"
#include "cpu/number.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"
#include "contract/sessions.h"

namespace jagged_cuda::cpu {
namespace {

template <class Offset>
void write_offsets(Tensor& tensor, const std::vector<int64_t>& values) {
  std::copy(values.begin(), values.end(), static_cast<Offset*>(tensor.mutable_data_ptr()));
}

Tensor offsets_like(const char* op, const Tensor& offsets, const std::vector<int64_t>& values) {
  Tensor tensor = allocate(op, offsets, {static_cast<int64_t>(values.size())});
  const bool wide = offsets.scalar_type() == ScalarType::Long;
  (wide ? write_offsets<int64_t> : write_offsets<int32_t>)(tensor, values);
  return tensor;
}

int64_t last_offset(const Tensor& offsets, int64_t total) {
  const Tensor dense = contiguous(offsets);
  const int64_t last = dense.size(0) - 1;
  return std::min<int64_t>(total, dense.scalar_type() == ScalarType::Long
                                      ? dense.const_data_ptr<int64_t>()[last]
                                      : dense.const_data_ptr<int32_t>()[last]);
}

std::tuple<Tensor, Tensor> jagged_sessionize(Tensor time, const Tensor& offsets, double gap,
                                             int64_t sessions) {
  constexpr const char* op = "jagged_sessionize";
  static const Contract contract(op);
  const Sizes sizes = contract.check({time, offsets, gap, sessions});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  time = as_contiguous(op, time);
  const SessionGap limit(gap);

  constexpr int64_t kRowCost = 8;
  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B; ++seq) {
    items.add(seq, sequences[static_cast<size_t>(seq)].len * kRowCost);
  }
  std::vector<int64_t> first(static_cast<size_t>(sizes.B) + 1, 0);
  std::vector<int64_t> begins(static_cast<size_t>(sessions) + 1);
  with_elements(time, [&](const auto* times) {
    // visit(row) for each row of a sequence at which a session starts.
    const auto for_each_start = [&](int64_t seq, const auto& visit) {
      const auto [begin, len] = sequences[static_cast<size_t>(seq)];
      for (int64_t row = begin; row < begin + len; ++row) {
        if (row == begin || limit.is_exceeded(times[row - 1], times[row])) visit(row);
      }
    };
    items.run(0, [&](int64_t seq, void*) {
      int64_t count = 0;
      for_each_start(seq, [&](int64_t) { ++count; });
      first[static_cast<size_t>(seq) + 1] = count;
    });
    for (size_t seq = 1; seq < first.size(); ++seq) first[seq] += first[seq - 1];
    if (check_mode() != CheckMode::kOff) {
      enforce(op, "sessions", CapacityRule{&first.back(), 0, sessions});
    }
    items.run(0, [&](int64_t seq, void*) {
      int64_t index = first[static_cast<size_t>(seq)];
      for_each_start(seq, [&](int64_t row) {
        if (index <= sessions) begins[static_cast<size_t>(index)] = row;
        ++index;
      });
    });
  });
  const int64_t found = std::min(first.back(), sessions + 1);
  const int64_t end = last_offset(offsets, sizes.T);
  std::fill(begins.begin() + found, begins.end(), end);
  for (int64_t& value : first) value = std::min(value, sessions);
  record_kernel(kernel_table().name);
  return {offsets_like(op, offsets, begins), offsets_like(op, offsets, first)};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_sessionize", TORCH_BOX(&jagged_cuda::cpu::jagged_sessionize));
}
