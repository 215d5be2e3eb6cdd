// The matrix product that every operator is made of: c = a b, in register tiles of a few rows by
// one or two vectors of columns.

template <class T>
struct Product {
  int64_t rows, columns, depth;  // columns: a multiple of kLanes
  const T* a;                    // (i, k) at a[i * a_row + k * a_step]
  int64_t a_row, a_step;
  const T* b;  // (k, j) at b[k * b_row + j]
  int64_t b_row;
  T* c;  // (i, j) at c[i * c_row + j]
  int64_t c_row;
  bool add = false;            // c = c + a b, else c = a b
  const T* rescale = nullptr;  // [rows] with add: c = rescale * c + a b
};

// One tile. Rows past the last are computed from the last one and not stored.
template <class T, int kTileRows, int kTileVectors>
__attribute__((noinline)) void multiply_tile(const Product<T>& p, int64_t row, int64_t column) {
  const int64_t valid = std::min<int64_t>(kTileRows, p.rows - row);
  const T* a[kTileRows];
  Vector<T> acc[kTileRows][kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    a[i] = p.a + (row + std::min<int64_t>(i, valid - 1)) * p.a_row;
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) acc[i][j] = Vector<T>{};
  }
  const T* b = p.b + column;
  const int64_t a_step = p.a_step, b_row = p.b_row;
  int64_t a_offset = 0;
  for (int64_t k = p.depth; k > 0; --k) {
    Vector<T> b_row_k[kTileVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) b_row_k[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const Vector<T> a_ik = broadcast(a[i][a_offset]);
#pragma GCC unroll 2
      for (int j = 0; j < kTileVectors; ++j) acc[i][j] += a_ik * b_row_k[j];
    }
    a_offset += a_step;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    if (i >= valid) break;
    T* c = p.c + (row + i) * p.c_row + column;
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) {
      Vector<T> result = acc[i][j];
      if (p.rescale != nullptr) {
        result += load(c + j * kLanes<T>) * p.rescale[row + i];
      } else if (p.add) {
        result += load(c + j * kLanes<T>);
      }
      store(c + j * kLanes<T>, result);
    }
  }
}

// Tile shapes: enough independent sums to hide the latency of a multiply-add (8 on current
// machines), as many as 16 vector registers (32 with AVX-512) hold. kFewRows is for the rows that
// the other leaves over.
constexpr int kTileRows = kVectorBytes == 64 ? 8 : 6;
constexpr int kFewRows = 4;
constexpr int kOneVectorRows = 8;

template <class T>
void multiply(const Product<T>& p) {
  int64_t column = 0;
  for (; column + 2 * kLanes<T> <= p.columns; column += 2 * kLanes<T>) {
    for (int64_t row = 0; row < p.rows;) {
      const int64_t left = p.rows - row;
      if (left <= kFewRows || (left > kTileRows && left <= 2 * kFewRows)) {
        multiply_tile<T, kFewRows, 2>(p, row, column);
        row += kFewRows;
      } else {
        multiply_tile<T, kTileRows, 2>(p, row, column);
        row += kTileRows;
      }
    }
  }
  if (column < p.columns) {
    for (int64_t row = 0; row < p.rows; row += kOneVectorRows) {
      multiply_tile<T, kOneVectorRows, 1>(p, row, column);
    }
  }
}
