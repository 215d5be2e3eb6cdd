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

// The offsets of a result of `total` rows and `num_seqs` sequences, which a planner fills.
struct PlannedOffsets {
  PlannedOffsets(const char* op, const Tensor& like_offsets, int64_t total, int64_t num_seqs)
      : capacity(plan_capacity(like_offsets.scalar_type(), total)),
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
  Tensor offsets;
  std::optional<Tensor>
      uncut;  // offsets before they are cut to the capacity, where they are checked
};

// The results of a planner, which it fills: which row each of `total` takes, and the offsets.
struct PlanTensors : PlannedOffsets {
  PlanTensors(const char* op, const Tensor& like_offsets, int64_t total, int64_t num_seqs)
      : PlannedOffsets(op, like_offsets, total, num_seqs),
        index(allocate(op, like_offsets, {total}, ScalarType::Long)) {}

  Tensor index;
};

}  // namespace jagged_cuda
