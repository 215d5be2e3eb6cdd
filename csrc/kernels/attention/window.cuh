// Which keys a query sees, as a band of the score matrix.
#pragma once

#include <cstdint>

namespace jagged_cuda {

// Row r sees columns [r + diagonal - before, r + diagonal + after]. Positions are 64-bit, so that
// an unbounded window (AttentionParams::kUnbounded) can be added to; within a tile they become
// 32-bit.
struct Window {
  int64_t diagonal;
  int64_t before;
  int64_t after;

  // The same band with rows and columns exchanged.
  __device__ __forceinline__ Window transposed() const { return {-diagonal, after, before}; }

  // Columns [first, last) that any of rows [row, row + rows) sees, out of num_columns.
  __device__ __forceinline__ int64_t first_column(int64_t row) const {
    const int64_t first = row + diagonal - before;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ int64_t last_column(int64_t row, int rows, int64_t num_columns) const {
    const int64_t last = row + rows + diagonal + after;
    return last < num_columns ? last : num_columns;
  }

  // True if some element of the tile [rows, columns] at (row, column) is not seen.
  __device__ __forceinline__ bool cuts_tile(int64_t row, int rows, int64_t column, int columns,
                                            int64_t num_columns) const {
    return column + columns > num_columns || row + rows - 1 + diagonal - before > column ||
           row + diagonal + after < column + columns - 1;
  }
};

// The columns [first, last) of a tile that one row sees, counted from the tile's first column.
struct VisibleColumns {
  int first;
  int last;

  __device__ __forceinline__ VisibleColumns(const Window& window, int64_t row, int64_t column,
                                            int columns, int64_t num_columns) {
    const int64_t low = row + window.diagonal - window.before - column;
    int64_t high = row + window.diagonal + window.after + 1 - column;
    high = high < num_columns - column ? high : num_columns - column;
    first = static_cast<int>(low < 0 ? 0 : (low > columns ? columns : low));
    last = static_cast<int>(high < 0 ? 0 : (high > columns ? columns : high));
  }

  __device__ __forceinline__ bool contains(int column) const {
    return column >= first && column < last;
  }
};

}  // namespace jagged_cuda
