// Shared by the operators over [sum Lx*Ly]: one matrix [Lx, Ly] per sequence, row by row, one after
// another in a vector of `capacity` elements.
//
// offsets give the rows of the matrices (Lx), y_offsets their columns (Ly; none: offsets), and
// matrix_offsets [B + 1], int64, where each matrix begins: the running sum of Lx*Ly. A matrix that
// reaches past the capacity does not fit: it counts as zeros, and JAGGED_CUDA_CHECK names it.
// Elements that belong to no matrix are zeros too.
#pragma once

#include "contract/contract.h"

namespace jagged_cuda {

// Whether rows * columns elements (neither negative) from `begin` on lie within [0, capacity).
inline bool matrix_fits(int64_t begin, int64_t rows, int64_t columns, int64_t capacity) {
  int64_t elems = 0;
  return !__builtin_mul_overflow(rows, columns, &elems) && begin >= 0 && begin <= capacity &&
         elems <= capacity - begin;
}

}  // namespace jagged_cuda
