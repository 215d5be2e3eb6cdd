// What the operators over [sum Lx*Ly] share: one matrix [Lx, Ly] a sequence, row by row, one after
// another in a vector of `capacity` elements.
//
// offsets say the rows of the matrices (Lx), y_offsets their columns (Ly; none: offsets), and
// matrix_offsets [B + 1], int64, where each begins: the running sum of Lx*Ly. A matrix that reaches
// past the capacity does not fit: it counts as zeros, and JAGGED_CUDA_CHECK names it. Elements that
// belong to no matrix are zeros too.
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

// Whether rows * columns elements (neither negative) from `begin` on lie within [0, capacity).
inline bool matrix_fits(int64_t begin, int64_t rows, int64_t columns, int64_t capacity) {
  int64_t elems = 0;
  return !__builtin_mul_overflow(rows, columns, &elems) && begin >= 0 && begin <= capacity &&
         elems <= capacity - begin;
}

// Names the first bad index of `matrix_offsets`, which lie on the host as do right offsets and
// y_offsets, or the first matrix that does not fit into `capacity`, what `argument` says.
template <typename Offset>
void validate_matrix_offsets(const char* op, const char* argument, const Offset* offsets,
                             const Offset* y_offsets, const int64_t* matrix_offsets,
                             int64_t num_seqs, int64_t capacity) {
  const std::string prefix = std::string(op) + ": ";
  const auto indexed = [](int64_t index) {
    return "matrix_offsets[" + std::to_string(index) + "]";
  };
  if (matrix_offsets[0] < 0) {
    fail(prefix + indexed(0) + " must be >= 0, got " + std::to_string(matrix_offsets[0]));
  }
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t rows = offsets[seq + 1] - offsets[seq];
    const int64_t columns = y_offsets[seq + 1] - y_offsets[seq];
    const int64_t end = matrix_offsets[seq] + rows * columns;
    if (matrix_offsets[seq + 1] != end) {
      fail(prefix + indexed(seq + 1) + " must be " + indexed(seq) + " + " + std::to_string(rows) +
           " * " + std::to_string(columns) + " = " + std::to_string(end) + ", got " +
           std::to_string(matrix_offsets[seq + 1]));
    }
    if (rows * columns > 0 && end > capacity) {
      fail(prefix + argument + " must be at least " + std::to_string(end) +
           " elements (the matrix of sequence " + std::to_string(seq) + " ends there), got " +
           std::to_string(capacity));
    }
  }
}

}  // namespace jagged_cuda
