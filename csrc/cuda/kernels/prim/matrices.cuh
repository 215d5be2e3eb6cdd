// How a kernel finds the matrix of a sequence in a vector of [sum Lx*Ly] elements, from offsets on
// the device alone.
//
// Everything is clamped: with wrong offsets, or wrong beginnings of matrices, values are
// unspecified, but a matrix counts only if all of it lies within the vector.
#pragma once

#include "cuda/kernels/prim/jagged.cuh"

#include <cstdint>

namespace jagged_cuda {

struct MatricesView {
  OffsetsView rows;        // [B + 1]: matrix b has as many rows as sequence b of these
  OffsetsView columns;     // [B + 1]: and as many columns as sequence b of these
  const int64_t* offsets;  // [B + 1], the running sum of rows * columns; not null
  int64_t capacity;        // elements of the vector
};

// The matrix of one sequence: element (i, j) is at begin + i * columns.len + j.
struct Matrix {
  RowRange rows;     // of the tensor whose sequences are the matrices' rows
  RowRange columns;  // of the tensor whose sequences are their columns
  int64_t begin;
  bool fits;  // else it counts as zeros, and must be neither read nor written
};

// Elements [0, begin) and [end, capacity) belong to no matrix.
struct MatricesExtent {
  int64_t begin;
  int64_t end;
};

#ifdef __CUDACC__

__device__ __forceinline__ Matrix find_matrix(const MatricesView& matrices, int64_t seq) {
  Matrix matrix;
  matrix.rows = sequence_rows(matrices.rows, seq);
  matrix.columns = sequence_rows(matrices.columns, seq);
  matrix.begin = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq);
  const uint64_t rows = matrix.rows.len, columns = matrix.columns.len;
  matrix.fits = matrix.begin >= 0 && matrix.begin <= matrices.capacity &&
                __umul64hi(rows, columns) == 0 &&
                rows * columns <= static_cast<uint64_t>(matrices.capacity - matrix.begin);
  return matrix;
}

// What the matrices that fit cover: they end where the first one that does not fit begins, at the
// largest offset within the capacity. All 32 lanes of a warp must call it together.
__device__ __forceinline__ MatricesExtent matrices_extent(const MatricesView& matrices) {
  const int lane = threadIdx.x % 32;
  const auto offset = [&](int64_t index) -> int64_t {
    return __ldg(reinterpret_cast<const long long*>(matrices.offsets) + index);
  };
  const auto clamped = [&](int64_t index) {
    const int64_t value = offset(index);
    return value < 0 ? int64_t{0} : value > matrices.capacity ? matrices.capacity : value;
  };
  int64_t low = 0, high = matrices.rows.num_seqs + 1;  // offset(low) <= capacity < offset(high)
  while (high - low > 1) {
    const int64_t step = (high - low + 32) / 33;
    const int64_t probe = low + step * (lane + 1);
    const bool within = probe < high && offset(probe) <= matrices.capacity;
    const int64_t passed = __popc(__ballot_sync(0xffffffffu, within));
    low += step * passed;
    high = high < low + step ? high : low + step;
  }
  return {clamped(0), clamped(low)};
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
