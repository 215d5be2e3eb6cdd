// jagged_jagged_bmm: z_b = x_b^T y_b, for each sequence b; a sequence without rows gives zeros.
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

struct JaggedJaggedBmmSizes {
  int64_t total;     // T: rows of x and y, summed over within each sequence
  int64_t num_seqs;  // B
  int64_t rows;      // D
  int64_t columns;   // N
};

// x [T, D], y [T, N], offsets [B + 1]
inline JaggedJaggedBmmSizes parse_jagged_jagged_bmm(const Tensor& x, const Tensor& y,
                                                    const Tensor& offsets) {
  constexpr const char* op = "jagged_jagged_bmm";
  check_dim(op, "x", x, 2, "[T, D]");
  check_dim(op, "y", y, 2, "[T, N]");
  check_floating(op, "x", x);
  check_like(op, "y", y, x);
  check_offsets(op, "offsets", offsets, x);
  const JaggedJaggedBmmSizes sizes{x.size(0), offsets.size(0) - 1, x.size(1), y.size(1)};
  check_shape(op, "y", y, {sizes.total, sizes.columns});
  return sizes;
}

}  // namespace jagged_cuda
