// jagged_softmax: softmax of scale * x over the rows of each sequence, each of the other positions
// alone.
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

struct JaggedSoftmaxSizes {
  int64_t total;     // T
  int64_t num_seqs;  // B
  int64_t columns;   // product of the dimensions after the first
};

// x [T, ...], offsets [B + 1]
inline JaggedSoftmaxSizes parse_jagged_softmax(const char* op, const char* argument,
                                               const Tensor& x, const Tensor& offsets) {
  if (x.dim() < 1) fail_argument(op, argument, "[T, ...]", shape_text(x));
  check_floating(op, argument, x);
  check_offsets(op, "offsets", offsets, x);
  int64_t columns = 1;
  for (int64_t dim = 1; dim < x.dim(); ++dim) columns *= x.size(dim);
  return {x.size(0), offsets.size(0) - 1, columns};
}

inline JaggedSoftmaxSizes parse_jagged_softmax(const Tensor& x, const Tensor& offsets) {
  return parse_jagged_softmax("jagged_softmax", "x", x, offsets);
}

// grad_out and out alike [T, ...]
inline JaggedSoftmaxSizes parse_jagged_softmax_backward(const Tensor& grad_out, const Tensor& out,
                                                        const Tensor& offsets) {
  constexpr const char* op = "jagged_softmax_backward";
  const JaggedSoftmaxSizes sizes = parse_jagged_softmax(op, "out", out, offsets);
  if (shape_text(grad_out) != shape_text(out)) {
    fail_argument(op, "grad_out", shape_text(out), shape_text(grad_out));
  }
  check_like(op, "grad_out", grad_out, out);
  return sizes;
}

// The [T, columns] form in which kernels take x: rows may be strided when x is [T, D] with a
// contiguous last dimension; every other layout that is not contiguous goes through one copy.
inline Tensor softmax_rows(const char* op, const Tensor& x) {
  return x.dim() == 2 ? rows_contiguous(op, x) : as_contiguous(op, x);
}

// Elements between two rows of what softmax_rows returned.
inline int64_t softmax_row_stride(const Tensor& x, int64_t columns) {
  return x.dim() == 2 ? x.stride(0) : columns;
}

}  // namespace jagged_cuda
