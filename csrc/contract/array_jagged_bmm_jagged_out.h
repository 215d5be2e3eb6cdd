// array_jagged_bmm_jagged_out: z_b = A_b y_b, or A_b^T y_b, for each sequence b, where the matrices
// A_b [Lx, Ly] stand row by row in one vector.
#pragma once

#include "contract/matrices.h"

namespace jagged_cuda {

struct ArrayJaggedBmmJaggedOutSizes {
  int64_t capacity;       // elements of a
  int64_t total_rows;     // Tx: rows of the tensor whose sequences are the matrices' rows
  int64_t total_columns;  // Ty: of the one whose sequences are their columns
  int64_t num_seqs;       // B
  int64_t total;          // of the result: Tx, or Ty if it is A_b^T y_b
  int64_t columns;        // N
};

// a [sum Lx*Ly], y [Ty, N], or [Tx, N] if `transpose`, offsets [B + 1], y_offsets [B + 1] or none
// (= offsets), matrix_offsets [B + 1]
inline ArrayJaggedBmmJaggedOutSizes parse_array_jagged_bmm_jagged_out(
    const Tensor& a, const Tensor& y, const Tensor& offsets, const std::optional<Tensor>& y_offsets,
    const Tensor& matrix_offsets, int64_t total, bool transpose) {
  constexpr const char* op = "array_jagged_bmm_jagged_out";
  check_dim(op, "a", a, 1, "[sum Lx*Ly]");
  check_dim(op, "y", y, 2, transpose ? "[Tx, N]" : "[Ty, N]");
  check_floating(op, "a", a);
  check_like(op, "y", y, a);
  check_offsets(op, "offsets", offsets, a);
  check_matrix_offsets(op, offsets, y_offsets, matrix_offsets);
  check_capacity(op, "total", total);
  const int64_t total_y = y.size(0);
  return {a.size(0),
          transpose ? total_y : total,
          transpose ? total : total_y,
          offsets.size(0) - 1,
          total,
          y.size(1)};
}

}  // namespace jagged_cuda
