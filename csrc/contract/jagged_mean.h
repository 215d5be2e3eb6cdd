// jagged_mean: the mean over the rows of each sequence; 0 without rows.
#pragma once

#include "contract/jagged_sum.h"

namespace jagged_cuda {

using JaggedMeanSizes = JaggedSumSizes;

// x [T, ...], offsets [B + 1]
inline JaggedMeanSizes parse_jagged_mean(const Tensor& x, const Tensor& offsets) {
  return parse_jagged_sum(x, offsets, "jagged_mean");
}

}  // namespace jagged_cuda
