// Which keys a query sees, as a band of the score matrix.
#pragma once

#include <cstdint>

namespace jagged_cuda {

// Row r sees columns [r + diagonal - before, r + diagonal + after]. Positions are of a type to
// which an unbounded window can be added: 64-bit for kUnbounded as it stands in AttentionParams,
// 32-bit where neither q nor k has kMaxRows32 rows. Within a tile they become 32-bit.
template <typename Index>
struct WindowOf {
  Index diagonal;
  Index before;
  Index after;

  // The same band with rows and columns exchanged.
  __device__ __forceinline__ WindowOf transposed() const { return {-diagonal, after, before}; }

  // Columns [first, last) that any of rows [row, row + rows) sees, out of num_columns.
  __device__ __forceinline__ Index first_column(Index row) const {
    const Index first = row + diagonal - before;
    return first > 0 ? first : 0;
  }
  __device__ __forceinline__ Index last_column(Index row, int rows, Index num_columns) const {
    const Index last = row + rows + diagonal + after;
    return last < num_columns ? last : num_columns;
  }

  // True if some element of the tile [rows, columns] at (row, column) is not seen.
  __device__ __forceinline__ bool cuts_tile(Index row, int rows, Index column, int columns,
                                            Index num_columns) const {
    return column + columns > num_columns || row + rows - 1 + diagonal - before > column ||
           row + diagonal + after < column + columns - 1;
  }
};

using Window = WindowOf<int64_t>;

constexpr int kMaxRows32 = 1 << 28;    // so that no sum of a row, a diagonal and a window overflows
constexpr int kUnbounded32 = 1 << 30;  // more than any difference of rows

// Rows of a window as 32-bit numbers.
__device__ __forceinline__ int window_rows32(int64_t rows) {
  return rows < kUnbounded32 ? static_cast<int>(rows) : kUnbounded32;
}

// The columns [first, last) of a tile that one row sees, counted from the tile's first column.
struct VisibleColumns {
  int first;
  int last;

  template <typename Index>
  __device__ __forceinline__ VisibleColumns(const WindowOf<Index>& window, Index row, Index column,
                                            int columns, Index num_columns) {
    const Index low = row + window.diagonal - window.before - column;
    Index high = row + window.diagonal + window.after + 1 - column;
    high = high < num_columns - column ? high : num_columns - column;
    first = static_cast<int>(low < 0 ? 0 : (low > columns ? columns : low));
    last = static_cast<int>(high < 0 ? 0 : (high > columns ? columns : high));
  }

  __device__ __forceinline__ bool contains(int column) const {
    return column >= first && column < last;
  }
};

}  // namespace jagged_cuda
