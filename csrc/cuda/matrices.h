// What the glue of the operators over [sum Lx*Ly] shares.
#pragma once

#include "cuda/glue.h"
#include "contract/matrices.h"

#include "cuda/kernels/prim/matrices.cuh"

namespace jagged_cuda {

// Contiguous offsets of matrices; must outlive the launch.
struct MatrixOffsets {
  Tensor rows;     // [B + 1], int32 or int64
  Tensor columns;  // [B + 1], of the same dtype
  Tensor begins;   // [B + 1], int64
};

// offsets, y_offsets (none: offsets) and matrix_offsets.
inline MatrixOffsets contiguous_offsets(const char* op, const Tensor& offsets,
                                        const std::optional<Tensor>& y_offsets,
                                        const Tensor& matrix_offsets) {
  const Tensor rows = as_contiguous(op, offsets);
  return {rows, y_offsets ? as_contiguous(op, *y_offsets) : rows,
          as_contiguous(op, matrix_offsets)};
}

inline MatricesView view_matrices(const MatrixOffsets& offsets, int64_t total_rows,
                                  int64_t total_columns, int64_t capacity) {
  return {view_offsets(offsets.rows, total_rows), view_offsets(offsets.columns, total_columns),
          static_cast<const int64_t*>(offsets.begins.const_data_ptr()), capacity};
}

inline void maybe_validate_matrices(const char* op, const char* argument,
                                    const MatrixOffsets& offsets, bool has_y_offsets,
                                    int64_t total_rows, int64_t total_columns, int64_t capacity) {
  maybe_validate_matrices(op, argument, offsets.rows, offsets.columns, has_y_offsets,
                          offsets.begins, total_rows, total_columns, capacity);
}

}  // namespace jagged_cuda
