// Shared by the operators that plan which rows move: for each of `total` rows of a result the
// number of the row that it takes, -1 for none, and the offsets of the result's sequences.
//
// `total` is a capacity. Rows that do not fit are left out, offsets are cut there, and
// JAGGED_CUDA_CHECK names the first sequence that reaches past it.
#pragma once

#include "contract/contract.h"

#include <limits>

namespace jagged_cuda {

// The public functions that ask jagged_slice for a plan; messages name them.
constexpr const char* kSliceFunctions[] = {"jagged_slice", "jagged_first", "jagged_last",
                                           "jagged_split"};

// The name of the offsets that a plan makes, in messages.
constexpr const char* kPlannedOffsets = "the result's offsets";

// The capacity, cut to what offsets of this dtype can say.
inline int64_t plan_capacity(ScalarType offsets_dtype, int64_t total) {
  return offsets_dtype == ScalarType::Int
             ? std::min<int64_t>(total, std::numeric_limits<int32_t>::max())
             : total;
}

}  // namespace jagged_cuda
