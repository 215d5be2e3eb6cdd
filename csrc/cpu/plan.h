// Plans of moves (contract/plan.h) on the CPU.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "contract/plan.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"

namespace jagged_cuda::cpu {

// The index and the offsets of a plan.
using Plan = std::tuple<Tensor, Tensor>;

// Where each sequence of the result begins, by how many rows each has, uncut: [rows + 1].
inline std::vector<int64_t> running_sum(const std::vector<Sequence>& ranges) {
  std::vector<int64_t> ends{0};
  for (const Sequence& range : ranges) ends.push_back(ends.back() + range.len);
  return ends;
}

// The offsets `ends`, cut to `capacity`, in the dtype of `offsets`. JAGGED_CUDA_CHECK asks for a
// check that nothing is cut.
inline Tensor planned_offsets(const char* op, const Tensor& offsets,
                              const std::vector<int64_t>& ends, int64_t capacity) {
  const int64_t size = static_cast<int64_t>(ends.size());
  if (check_mode() != CheckMode::kOff) {
    enforce(op, kPlannedOffsets, OffsetsRule<int64_t>{ends.data(), size - 1, capacity, kUnlimited});
  }
  Tensor planned = allocate(op, offsets, {size});
  const auto store = [&](auto* out) {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = static_cast<std::decay_t<decltype(*out)>>(
          std::min(ends[static_cast<size_t>(i)], capacity));
    }
  };
  if (offsets.scalar_type() == ScalarType::Int) {
    store(planned.mutable_data_ptr<int32_t>());
  } else {
    store(planned.mutable_data_ptr<int64_t>());
  }
  return planned;
}

// The plan that takes ranges of rows, one after another: each is a sequence of the result.
inline Plan plan_ranges(const char* op, const Tensor& offsets, const std::vector<Sequence>& ranges,
                        int64_t total) {
  const int64_t capacity = plan_capacity(offsets.scalar_type(), total);
  const std::vector<int64_t> ends = running_sum(ranges);
  Tensor planned = planned_offsets(op, offsets, ends, capacity);
  Tensor index = allocate(op, offsets, {total}, ScalarType::Long);
  int64_t* rows = index.mutable_data_ptr<int64_t>();
  WorkList<int64_t> items;
  for (size_t i = 0; i < ranges.size(); ++i) items.add(static_cast<int64_t>(i), ranges[i].len);
  items.run(0, [&](int64_t item, void*) {
    const size_t i = static_cast<size_t>(item);
    const int64_t begin = std::min(ends[i], capacity), end = std::min(ends[i + 1], capacity);
    for (int64_t row = begin; row < end; ++row) rows[row] = ranges[i].begin + (row - begin);
  });
  std::fill(rows + std::min(ends.back(), capacity), rows + total, -1);
  return {index, planned};
}

}  // namespace jagged_cuda::cpu
