// jagged_softmax: out = exp(scale * x - max) / sum, with max and sum over the rows of a sequence,
// for each column alone. Backward: grad_in = scale * out * (grad_out - sum of grad_out * out).
//
// Rows are read in blocks, as accumulators, and seen as "super rows" of whole vectors: one row
// where its columns fill vectors, else the fewest consecutive rows that do (8 lanes hold 4 rows of
// 2 columns). Lane i of a super row belongs to column i % columns; each lane keeps statistics of
// its own, which are combined at the end. A block is filled up to whole super rows with values that
// change nothing.

template <class T>
struct SoftmaxLayout {
  int64_t columns;
  int64_t rows_per_super;
  int64_t lanes;       // of a super row
  int64_t block_rows;  // rows that are read at a time: whole super rows

  explicit SoftmaxLayout(const SoftmaxItem& item) : columns(item.columns), rows_per_super(1) {
    while (columns * rows_per_super % kLanes<T> != 0) rows_per_super *= 2;
    lanes = columns * rows_per_super;
    block_rows = kSoftmaxBlock / lanes * rows_per_super;
  }
  int64_t supers(int64_t rows) const { return (rows + rows_per_super - 1) / rows_per_super; }
};

// Super rows, `stride` elements apart.
template <class T>
struct SoftmaxBlock {
  T* data;
  int64_t stride;
};

// A block of `data` times `factor`, filled up with `filler`: in place where rows are whole vectors
// of accumulators and need no factor, else in `scratch`.
template <class T>
SoftmaxBlock<const T> read_softmax_block(const SoftmaxLayout<T>& layout, Element element,
                                         const void* data, int64_t row_stride,
                                         const SoftmaxItem& item, int64_t row, int64_t rows,
                                         T factor, T filler, T* scratch) {
  const void* src = element_at(data, element, (item.begin + row) * row_stride + item.column_begin);
  if (is_accumulator<T>(element) && layout.rows_per_super == 1 && factor == T(1)) {
    return {static_cast<const T*>(src), row_stride};
  }
  const int64_t count = rows * layout.columns;
  if (row_stride == layout.columns) {
    load_elements(scratch, src, element, count);
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      load_elements(scratch + i * layout.columns, element_at(src, element, i * row_stride), element,
                    layout.columns);
    }
  }
  const int64_t padded = layout.supers(rows) * layout.lanes;
  for (int64_t i = 0; i < padded && factor != T(1); i += kLanes<T>) {
    store<T>(scratch + i, load(scratch + i) * factor);
  }
  std::fill(scratch + count, scratch + padded, filler);
  return {scratch, layout.lanes};
}

// Where the results of a block go: the tensor itself or `scratch`, from which finish_softmax_block
// stores them.
template <class T>
SoftmaxBlock<T> softmax_results(const SoftmaxLayout<T>& layout, const SoftmaxParams& p,
                                const SoftmaxItem& item, int64_t row, T* scratch) {
  if (!is_accumulator<T>(p.element) || layout.rows_per_super > 1) return {scratch, layout.lanes};
  return {static_cast<T*>(p.out) + (item.begin + row) * p.columns + item.column_begin, p.columns};
}

template <class T>
void finish_softmax_block(const SoftmaxLayout<T>& layout, const SoftmaxParams& p,
                          const SoftmaxItem& item, int64_t row, int64_t rows, const T* scratch) {
  if (is_accumulator<T>(p.element) && layout.rows_per_super == 1) return;
  void* dst = element_at(p.out, p.element, (item.begin + row) * p.columns + item.column_begin);
  if (p.columns == layout.columns) {
    store_elements(dst, scratch, p.element, rows * layout.columns);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    store_elements(element_at(dst, p.element, i * p.columns), scratch + i * layout.columns,
                   p.element, layout.columns);
  }
}

// The value to subtract from logits before exp: no NaN where nothing but -inf was seen.
template <class T>
JAGGED_INLINE Vector<T> finite_max(Vector<T> max) {
  return max == -std::numeric_limits<T>::infinity() ? broadcast<T>(0) : max;
}

// Sums and maxima of lanes are taken for so many vectors at a time, where there are as many: rows
// that come from memory should be read whole.
constexpr int kManyVectors = 16, kSomeVectors = 4;

template <class T, int kVectors>
void max_softmax_lanes(const SoftmaxBlock<const T>& x, int64_t supers, int64_t v, T* max) {
  Vector<T> result[kVectors];
  for (int j = 0; j < kVectors; ++j) result[j] = load(max + v + j * kLanes<T>);
  for (int64_t i = 0; i < supers; ++i) {
    const T* row = x.data + i * x.stride + v;
    for (int j = 0; j < kVectors; ++j)
      result[j] = vector_max<T>(load(row + j * kLanes<T>), result[j]);
  }
  for (int j = 0; j < kVectors; ++j) store<T>(max + v + j * kLanes<T>, result[j]);
}

template <class T, int kVectors>
void dot_softmax_lanes(const SoftmaxBlock<const T>& out, const SoftmaxBlock<const T>& grad,
                       int64_t supers, int64_t v, T* sum) {
  Vector<T> result[kVectors];
  for (int j = 0; j < kVectors; ++j) result[j] = load(sum + v + j * kLanes<T>);
  for (int64_t i = 0; i < supers; ++i) {
    const T* out_row = out.data + i * out.stride + v;
    const T* grad_row = grad.data + i * grad.stride + v;
    for (int j = 0; j < kVectors; ++j) {
      result[j] += load(out_row + j * kLanes<T>) * load(grad_row + j * kLanes<T>);
    }
  }
  for (int j = 0; j < kVectors; ++j) store<T>(sum + v + j * kLanes<T>, result[j]);
}

// e = exp(x - max), sum += e.
template <class T, int kVectors>
void exp_softmax_lanes(const SoftmaxBlock<const T>& x, int64_t supers, int64_t lanes, int64_t v,
                       const T* max, T* sum, T* e) {
  Vector<T> subtracted[kVectors], result[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    subtracted[j] = finite_max<T>(load(max + v + j * kLanes<T>));
    result[j] = load(sum + v + j * kLanes<T>);
  }
  for (int64_t i = 0; i < supers; ++i) {
    const T* row = x.data + i * x.stride + v;
    T* e_row = e + i * lanes + v;
    for (int j = 0; j < kVectors; ++j) {
      const Vector<T> value = vector_exp<T>(load(row + j * kLanes<T>) - subtracted[j]);
      store<T>(e_row + j * kLanes<T>, value);
      result[j] += value;
    }
  }
  for (int j = 0; j < kVectors; ++j) store<T>(sum + v + j * kLanes<T>, result[j]);
}

// Takes a block of logits into the statistics of its lanes; e [supers, lanes] = exp(x - max of the
// lane). `old_max` [lanes] is scratch.
template <class T>
void exp_softmax_block(const SoftmaxBlock<const T>& x, int64_t supers, int64_t lanes, T* max,
                       T* sum, T* old_max, T* e) {
  constexpr int64_t kMany = kManyVectors * kLanes<T>, kSome = kSomeVectors * kLanes<T>;
  std::copy_n(max, lanes, old_max);
  int64_t v = 0;
  for (; v + kMany <= lanes; v += kMany) max_softmax_lanes<T, kManyVectors>(x, supers, v, max);
  for (; v < lanes; v += kLanes<T>) max_softmax_lanes<T, 1>(x, supers, v, max);
  for (v = 0; v < lanes; v += kLanes<T>) {
    const Vector<T> shift = load(old_max + v) - finite_max<T>(load(max + v));
    store<T>(sum + v, load(sum + v) * vector_exp<T>(shift));
  }
  for (v = 0; v + kSome <= lanes; v += kSome) {
    exp_softmax_lanes<T, kSomeVectors>(x, supers, lanes, v, max, sum, e);
  }
  for (; v < lanes; v += kLanes<T>) exp_softmax_lanes<T, 1>(x, supers, lanes, v, max, sum, e);
}

// sum += grad * out of a block.
template <class T>
void dot_softmax_block(const SoftmaxBlock<const T>& out, const SoftmaxBlock<const T>& grad,
                       int64_t supers, int64_t lanes, T* sum) {
  constexpr int64_t kMany = kManyVectors * kLanes<T>;
  int64_t v = 0;
  for (; v + kMany <= lanes; v += kMany)
    dot_softmax_lanes<T, kManyVectors>(out, grad, supers, v, sum);
  for (; v < lanes; v += kLanes<T>) dot_softmax_lanes<T, 1>(out, grad, supers, v, sum);
}

// Statistics [parts, columns] into those of the first part.
template <class T>
void combine_softmax_statistics(bool backward, T* max, T* sum, int64_t parts, int64_t columns) {
  for (int64_t column = 0; column < columns; ++column) {
    T total_max = max[column], total_sum = 0;
    if (!backward) {
      for (int64_t part = 1; part < parts; ++part) {
        total_max = scalar_max(max[part * columns + column], total_max);
      }
    }
    const T subtracted = total_max == -std::numeric_limits<T>::infinity() ? T(0) : total_max;
    for (int64_t part = 0; part < parts; ++part) {
      const T part_sum = sum[part * columns + column];
      const T part_max = max[part * columns + column];
      total_sum +=
          backward || part_max == total_max ? part_sum : part_sum * std::exp(part_max - subtracted);
    }
    max[column] = total_max;
    sum[column] = total_sum;
  }
}

// One block of the operands of the backward pass.
template <class T>
struct SoftmaxOperands {
  SoftmaxBlock<const T> out, grad;

  SoftmaxOperands(const SoftmaxParams& p, const SoftmaxItem& item, const SoftmaxLayout<T>& layout,
                  const SoftmaxBuffers<T>& buffers, int64_t row, int64_t rows)
      : out(read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows, T(1), T(0),
                               buffers.x)),
        grad(read_softmax_block(layout, p.element, p.grad_out, p.grad_row_stride, item, row, rows,
                                T(1), T(0), buffers.grad)) {}
};

// Of all rows of an item, by lanes; the exponentials of the last block stay in buffers.x.
template <class T>
void softmax_lane_statistics(const SoftmaxParams& p, const SoftmaxItem& item,
                             const SoftmaxLayout<T>& layout, const SoftmaxBuffers<T>& buffers) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  std::fill_n(buffers.max, layout.lanes, p.backward ? T(0) : -kInfinity);
  std::fill_n(buffers.sum, layout.lanes, T(0));
  for (int64_t row = 0; row < item.rows; row += layout.block_rows) {
    const int64_t rows = std::min(layout.block_rows, item.rows - row);
    const int64_t supers = layout.supers(rows);
    if (p.backward) {
      const SoftmaxOperands<T> block(p, item, layout, buffers, row, rows);
      dot_softmax_block(block.out, block.grad, supers, layout.lanes, buffers.sum);
    } else {
      const auto x = read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows,
                                        T(p.scale), -kInfinity, buffers.x);
      exp_softmax_block(x, supers, layout.lanes, buffers.max, buffers.sum, buffers.lane_max,
                        buffers.x);
    }
  }
}

// grad_in = scale * out * (grad - sum) of a block.
template <class T>
void softmax_grad_block(const SoftmaxParams& p, const SoftmaxItem& item,
                        const SoftmaxLayout<T>& layout, const SoftmaxBuffers<T>& buffers,
                        int64_t row, int64_t rows) {
  const SoftmaxOperands<T> block(p, item, layout, buffers, row, rows);
  const SoftmaxBlock<T> result = softmax_results(layout, p, item, row, buffers.x);
  const T scale = static_cast<T>(p.scale);
  for (int64_t i = 0; i < layout.supers(rows); ++i) {
    const T* out = block.out.data + i * block.out.stride;
    const T* grad = block.grad.data + i * block.grad.stride;
    for (int64_t v = 0; v < layout.lanes; v += kLanes<T>) {
      const Vector<T> centered = load(grad + v) - load(buffers.sum + v);
      store<T>(result.data + i * result.stride + v, load(out + v) * scale * centered);
    }
  }
  finish_softmax_block(layout, p, item, row, rows, buffers.x);
}

template <class T>
void softmax_statistics(const SoftmaxParams& p, const SoftmaxItem& item, void* max, void* sum,
                        void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers{arena, p};
  const SoftmaxLayout<T> layout(item);
  softmax_lane_statistics(p, item, layout, buffers);
  combine_softmax_statistics(p.backward, buffers.max, buffers.sum, layout.rows_per_super,
                             layout.columns);
  std::copy_n(buffers.max, layout.columns, static_cast<T*>(max));
  std::copy_n(buffers.sum, layout.columns, static_cast<T*>(sum));
}

template <class T>
void softmax_combine(const SoftmaxParams& p, void* max, void* sum, int64_t parts, int64_t columns) {
  combine_softmax_statistics(p.backward, static_cast<T*>(max), static_cast<T*>(sum), parts,
                             columns);
}

template <class T>
void softmax_write(const SoftmaxParams& p, const SoftmaxItem& item, const void* max,
                   const void* sum, void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers{arena, p};
  const SoftmaxLayout<T> layout(item);
  for (int64_t lane = 0; lane < layout.lanes; ++lane) {
    const int64_t column = lane % layout.columns;
    buffers.max[lane] = static_cast<const T*>(max)[column];
    buffers.sum[lane] = static_cast<const T*>(sum)[column];
  }
  for (int64_t v = 0; v < layout.lanes && !p.backward; v += kLanes<T>) {
    store<T>(buffers.max + v, finite_max<T>(load(buffers.max + v)));
    store<T>(buffers.sum + v, T(1) / load(buffers.sum + v));
  }
  for (int64_t row = 0; row < item.rows; row += layout.block_rows) {
    const int64_t rows = std::min(layout.block_rows, item.rows - row);
    if (p.backward) {
      softmax_grad_block(p, item, layout, buffers, row, rows);
      continue;
    }
    const auto x = read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows,
                                      T(p.scale), T(0), buffers.x);
    const SoftmaxBlock<T> result = softmax_results(layout, p, item, row, buffers.x);
    for (int64_t i = 0; i < layout.supers(rows); ++i) {
      for (int64_t v = 0; v < layout.lanes; v += kLanes<T>) {
        const Vector<T> e = vector_exp<T>(load(x.data + i * x.stride + v) - load(buffers.max + v));
        store<T>(result.data + i * result.stride + v, e * load(buffers.sum + v));
      }
    }
    finish_softmax_block(layout, p, item, row, rows, buffers.x);
  }
}

template <class T>
void softmax(const SoftmaxParams& p, const SoftmaxItem& item, void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers{arena, p};
  const SoftmaxLayout<T> layout(item);
  if (item.rows > layout.block_rows) {
    softmax_statistics<T>(p, item, buffers.column_max, buffers.column_sum, scratch);
    softmax_write<T>(p, item, buffers.column_max, buffers.column_sum, scratch);
    return;
  }
  // One block: it is still there, its exponentials are not computed again.
  softmax_lane_statistics(p, item, layout, buffers);
  const int64_t supers = layout.supers(item.rows), lanes = layout.lanes, columns = layout.columns;
  std::copy_n(buffers.max, lanes, buffers.lane_max);
  combine_softmax_statistics(p.backward, buffers.max, buffers.sum, layout.rows_per_super, columns);
  for (int64_t lane = columns; lane < lanes; ++lane) {
    buffers.max[lane] = buffers.max[lane % columns];
    buffers.sum[lane] = buffers.sum[lane % columns];
  }
  if (p.backward) {
    softmax_grad_block(p, item, layout, buffers, 0, item.rows);
    return;
  }
  for (int64_t v = 0; v < lanes; v += kLanes<T>) {
    Vector<T> factor = T(1) / load(buffers.sum + v);
    if (layout.rows_per_super > 1) {
      factor *= vector_exp<T>(load(buffers.lane_max + v) - finite_max<T>(load(buffers.max + v)));
    }
    store<T>(buffers.sum + v, factor);
  }
  const SoftmaxBlock<T> result = softmax_results(layout, p, item, 0, buffers.x);
  for (int64_t i = 0; i < supers; ++i) {
    for (int64_t v = 0; v < lanes; v += kLanes<T>) {
      store<T>(result.data + i * result.stride + v,
               load(buffers.x + i * lanes + v) * load(buffers.sum + v));
    }
  }
  finish_softmax_block(layout, p, item, 0, item.rows, buffers.x);
}
