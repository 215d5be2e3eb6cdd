// What the glue of the operators that plan moves shares (contract/plan.h).
#pragma once

#include "cuda/glue.h"
#include "contract/checks.h"
#include "contract/plan.h"

#include <optional>
#include <tuple>

namespace jagged_cuda {

// The index and the offsets of a plan.
using Plan = std::tuple<Tensor, Tensor>;

// The results of a planner, which it fills: `total` rows, and offsets of `num_seqs` sequences.
struct PlanTensors {
  PlanTensors(const char* op, const Tensor& like_offsets, int64_t total, int64_t num_seqs)
      : capacity(plan_capacity(like_offsets.scalar_type(), total)),
        index(allocate(op, like_offsets, {total}, ScalarType::Long)),
        offsets(allocate(op, like_offsets, {num_seqs + 1})) {
    if (check_mode() != CheckMode::kOff) {
      uncut = allocate(op, like_offsets, {num_seqs + 1}, ScalarType::Long);
    }
  }

  int64_t* uncut_data() const { return uncut ? uncut->mutable_data_ptr<int64_t>() : nullptr; }

  // As JAGGED_CUDA_CHECK asks for it: that all rows fit. After the kernels are enqueued.
  void maybe_validate(const char* op) const {
    if (!uncut) return;
    maybe_validate_offsets(op, kPlannedOffsets, *uncut, capacity, std::nullopt, /*is_first=*/false);
  }

  int64_t capacity;
  Tensor index, offsets;
  std::optional<Tensor>
      uncut;  // offsets before they are cut to the capacity, where they are checked
};

}  // namespace jagged_cuda
