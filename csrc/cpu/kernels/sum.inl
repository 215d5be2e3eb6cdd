// jagged_sum and jagged_mean: the sums over the rows of an item, for each column alone.
//
// Rows of few columns are seen as "super rows" of up to kSumLanes elements: lane i belongs to
// column i % columns, and the lanes of a column are added at the end. Each element of the tensor is
// so added to a lane of its own, which the compiler turns into vectors.

template <class T>
void add_row(T* sums, const void* src, Element element, int64_t count, T* scratch) {
  const T* row = static_cast<const T*>(src);
  if (!is_accumulator<T>(element)) {
    load_elements(scratch, src, element, count);
    row = scratch;
  }
  for (int64_t i = 0; i < count; ++i) sums[i] += row[i];
}

template <class T>
void store_sums(const SumParams& p, void* sums, int64_t parts, int64_t columns, double divisor,
                void* out) {
  T* total = static_cast<T*>(sums);
  for (int64_t part = 1; part < parts; ++part) {
    const T* other = total + part * columns;
    for (int64_t i = 0; i < columns; ++i) total[i] += other[i];
  }
  if (divisor != 1.0) {
    for (int64_t i = 0; i < columns; ++i) total[i] /= static_cast<T>(divisor);
  }
  store_elements(out, total, p.element, columns);
}

// To `sums` [columns], accumulators, or finished to `out` [columns].
template <class T>
void sum_rows(const SumParams& p, const SumItem& item, void* sums, void* out, double divisor,
              void* scratch) {
  Arena arena(scratch);
  const SumBuffers<T> buffers{arena, p};
  const bool dense = p.x_row_stride == item.columns;
  const int64_t rows_per_super =
      dense && item.columns > 0 ? std::max<int64_t>(1, kSumLanes / item.columns) : 1;
  const int64_t lanes = rows_per_super * item.columns;
  const void* x = element_at(p.x, p.element, item.begin * p.x_row_stride + item.column_begin);
  std::fill_n(buffers.sums, std::max(lanes, item.columns), T(0));
  int64_t row = 0;
  for (; row + rows_per_super <= item.rows; row += rows_per_super) {
    add_row(buffers.sums, element_at(x, p.element, row * p.x_row_stride), p.element, lanes,
            buffers.row);
  }
  add_row(buffers.sums, element_at(x, p.element, row * p.x_row_stride), p.element,
          (item.rows - row) * item.columns, buffers.row);
  for (int64_t i = 1; i < rows_per_super; ++i) {
    for (int64_t column = 0; column < item.columns; ++column) {
      buffers.sums[column] += buffers.sums[i * item.columns + column];
    }
  }
  if (sums != nullptr) {
    std::copy_n(buffers.sums, item.columns, static_cast<T*>(sums));
  } else {
    store_sums<T>(p, buffers.sums, 1, item.columns, divisor, out);
  }
}
