// jagged_sum: the sum over the rows of each sequence.
#pragma once

#include "contract/rows.h"

namespace jagged_cuda {

struct JaggedSumSizes {
  int64_t total;     // T
  int64_t num_seqs;  // B
  int64_t columns;   // product of the dimensions after the first
};

// x [T, ...], offsets [B + 1]; for jagged_mean too.
inline JaggedSumSizes parse_jagged_sum(const Tensor& x, const Tensor& offsets,
                                       const char* op = "jagged_sum") {
  if (x.dim() < 1) fail_argument(op, "x", "[T, ...]", shape_text(x));
  check_floating(op, "x", x);
  check_offsets(op, "offsets", offsets, x);
  return {x.size(0), offsets.size(0) - 1, row_elems(x, 1)};
}

}  // namespace jagged_cuda
