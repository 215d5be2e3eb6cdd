// jagged2_softmax: softmax of scale * A_b for each matrix A_b [Lx, Ly], over its columns (dim -1)
// or over its rows (dim -2).
#pragma once

#include "contract/matrices.h"

namespace jagged_cuda {

struct Jagged2SoftmaxSizes {
  int64_t capacity;  // elements of a
  int64_t num_seqs;  // B
  bool over_rows;    // dim is -2
};

// `a` [sum Lx*Ly], offsets [B + 1], y_offsets [B + 1] or none (= offsets), matrix_offsets [B + 1]
inline Jagged2SoftmaxSizes parse_jagged2_softmax(const char* op, const char* argument,
                                                 const Tensor& a, const Tensor& offsets,
                                                 const std::optional<Tensor>& y_offsets,
                                                 const Tensor& matrix_offsets, int64_t dim) {
  check_dim(op, argument, a, 1, "[sum Lx*Ly]");
  check_floating(op, argument, a);
  check_offsets(op, "offsets", offsets, a);
  check_matrix_offsets(op, offsets, y_offsets, matrix_offsets);
  if (dim != -1 && dim != -2) fail_argument(op, "dim", "-1 or -2", std::to_string(dim));
  return {a.size(0), offsets.size(0) - 1, dim == -2};
}

inline Jagged2SoftmaxSizes parse_jagged2_softmax(const Tensor& a, const Tensor& offsets,
                                                 const std::optional<Tensor>& y_offsets,
                                                 const Tensor& matrix_offsets, int64_t dim) {
  return parse_jagged2_softmax("jagged2_softmax", "a", a, offsets, y_offsets, matrix_offsets, dim);
}

// grad_out and out alike [sum Lx*Ly]
inline Jagged2SoftmaxSizes parse_jagged2_softmax_backward(const Tensor& grad_out, const Tensor& out,
                                                          const Tensor& offsets,
                                                          const std::optional<Tensor>& y_offsets,
                                                          const Tensor& matrix_offsets,
                                                          int64_t dim) {
  constexpr const char* op = "jagged2_softmax_backward";
  const Jagged2SoftmaxSizes sizes =
      parse_jagged2_softmax(op, "out", out, offsets, y_offsets, matrix_offsets, dim);
  check_shape(op, "grad_out", grad_out, {sizes.capacity});
  check_like(op, "grad_out", grad_out, out);
  return sizes;
}

}  // namespace jagged_cuda
