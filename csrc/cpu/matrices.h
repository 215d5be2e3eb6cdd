// One matrix per sequence, as the CPU's kernels take them.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/sequences.h"
#include "contract/matrices.h"

namespace jagged_cuda::cpu {

// Element (i, j) of the matrix of one sequence is at begin + i * columns.len + j.
struct Matrix {
  Sequence rows;     // of the tensor whose sequences are the matrices' rows
  Sequence columns;  // of the tensor whose sequences are their columns
  int64_t begin;
  bool fits;  // else it counts as zeros, and must be neither read nor written
};

// The matrices of offsets, y_offsets (none: offsets) and matrix_offsets, each [B + 1], in
// `capacity` elements, as `argument` says. JAGGED_CUDA_CHECK asks for a check that all fit;
// all else is always checked.
inline std::vector<Matrix> read_matrices(const char* op, const char* argument,
                                         const Tensor& offsets,
                                         const std::optional<Tensor>& y_offsets,
                                         const Tensor& matrix_offsets, int64_t total_rows,
                                         int64_t total_columns, int64_t capacity) {
  const Tensor& given_columns = y_offsets ? *y_offsets : offsets;
  const auto rows = read_sequences(op, "offsets", offsets, total_rows);
  const auto columns =
      read_sequences(op, y_offsets ? "y_offsets" : "offsets", given_columns, total_columns);
  const Tensor dense = contiguous(matrix_offsets);
  const int64_t* begins = dense.const_data_ptr<int64_t>();
  const int64_t num_seqs = dense.size(0) - 1;
  const int64_t checked_capacity = check_mode() == CheckMode::kOff ? kUnlimited : capacity;
  const auto check = [&](auto zero) {
    using Offset = decltype(zero);
    const Tensor row_offsets = contiguous(offsets), column_offsets = contiguous(given_columns);
    enforce(op, argument,
            MatrixOffsetsRule<Offset>{row_offsets.const_data_ptr<Offset>(),
                                      column_offsets.const_data_ptr<Offset>(), begins, num_seqs,
                                      checked_capacity});
  };
  if (offsets.scalar_type() == ScalarType::Int) {
    check(int32_t{0});
  } else {
    check(int64_t{0});
  }
  std::vector<Matrix> matrices(rows.size());
  for (size_t seq = 0; seq < rows.size(); ++seq) {
    const bool fits = matrix_fits(begins[seq], rows[seq].len, columns[seq].len, capacity);
    matrices[seq] = {rows[seq], columns[seq], begins[seq], fits};
  }
  return matrices;
}

// Zeros for the elements of `out` that belong to no matrix. Runs before the kernels: with wrong
// offsets these elements may belong to a matrix too.
inline void zero_elements_outside(const Tensor& matrix_offsets, int64_t capacity,
                                  int64_t element_bytes, void* out) {
  const Tensor dense = contiguous(matrix_offsets);
  const int64_t* begins = dense.const_data_ptr<int64_t>();
  const int64_t first = std::clamp<int64_t>(begins[0], 0, capacity);
  int64_t end = first;  // the largest offset within the capacity
  for (int64_t seq = 0; seq < dense.size(0); ++seq) {
    if (begins[seq] <= capacity) end = std::max(end, begins[seq]);
  }
  if (capacity == 0) return;
  char* bytes = static_cast<char*>(out);
  std::memset(bytes, 0, static_cast<size_t>(first * element_bytes));
  std::memset(bytes + end * element_bytes, 0,
              static_cast<size_t>((capacity - end) * element_bytes));
}

}  // namespace jagged_cuda::cpu
