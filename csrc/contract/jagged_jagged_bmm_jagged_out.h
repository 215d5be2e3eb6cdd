// jagged_jagged_bmm_jagged_out: z_b = x_b y_b^T, for each sequence b, row by row in one vector.
#pragma once

#include "contract/matrices.h"

namespace jagged_cuda {

struct JaggedJaggedBmmJaggedOutSizes {
  int64_t total_x;   // Tx: rows of x, those of the matrices
  int64_t total_y;   // Ty: rows of y, the columns of the matrices
  int64_t num_seqs;  // B
  int64_t inner;     // D: features that are summed over
  int64_t capacity;  // elements of the result
};

// x [Tx, D], y [Ty, D], offsets [B + 1], y_offsets [B + 1] or none (= offsets), matrix_offsets
// [B + 1]
inline JaggedJaggedBmmJaggedOutSizes parse_jagged_jagged_bmm_jagged_out(
    const Tensor& x, const Tensor& y, const Tensor& offsets, const std::optional<Tensor>& y_offsets,
    const Tensor& matrix_offsets, int64_t total_out) {
  constexpr const char* op = "jagged_jagged_bmm_jagged_out";
  check_dim(op, "x", x, 2, "[Tx, D]");
  check_dim(op, "y", y, 2, "[Ty, D]");
  check_floating(op, "x", x);
  check_like(op, "y", y, x);
  check_offsets(op, "offsets", offsets, x);
  const JaggedJaggedBmmJaggedOutSizes sizes{x.size(0), y.size(0), offsets.size(0) - 1, x.size(1),
                                            total_out};
  check_shape(op, "y", y, {sizes.total_y, sizes.inner});
  if (!y_offsets && sizes.total_y != sizes.total_x) {
    fail_argument(
        op, "y",
        shape_text({sizes.total_x, sizes.inner}) + " (the rows of x, as y_offsets is None)",
        shape_text(y));
  }
  check_matrix_offsets(op, offsets, y_offsets, matrix_offsets);
  check_capacity(op, "total_out", total_out);
  return sizes;
}

}  // namespace jagged_cuda
