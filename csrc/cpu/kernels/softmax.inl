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

// A block of `data` times `factor`, filled up with `filler`: [supers(rows), lanes].
template <class T>
void read_softmax_block(const SoftmaxLayout<T>& layout, Element element, const void* data,
                        int64_t row_stride, const SoftmaxItem& item, int64_t row, int64_t rows,
                        T factor, T filler, T* dst) {
  const void* src = element_at(data, element, (item.begin + row) * row_stride + item.column_begin);
  const int64_t count = rows * layout.columns;
  if (row_stride == layout.columns) {
    load_elements(dst, src, element, count);
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      load_elements(dst + i * layout.columns, element_at(src, element, i * row_stride), element,
                    layout.columns);
    }
  }
  const int64_t padded = layout.supers(rows) * layout.lanes;
  if (factor != T(1)) {
    for (int64_t i = 0; i < padded; i += kLanes<T>) store<T>(dst + i, load(dst + i) * factor);
  }
  std::fill(dst + count, dst + padded, filler);
}

template <class T>
void write_softmax_block(const SoftmaxLayout<T>& layout, const SoftmaxParams& p,
                         const SoftmaxItem& item, int64_t row, int64_t rows, const T* src) {
  void* dst = element_at(p.out, p.element, (item.begin + row) * p.columns + item.column_begin);
  if (p.columns == layout.columns) {
    store_elements(dst, src, p.element, rows * layout.columns);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    store_elements(element_at(dst, p.element, i * p.columns), src + i * layout.columns, p.element,
                   layout.columns);
  }
}

// The value to take from logits ahead of exp: no NaN where nothing but -inf was seen.
template <class T>
JAGGED_INLINE Vector<T> finite_max(Vector<T> max) {
  return max == -std::numeric_limits<T>::infinity() ? broadcast<T>(0) : max;
}

// Lanes are taken several vectors at a time, so that whole cache lines are used as they come.
constexpr int64_t kSoftmaxVectors = 4;

// Takes lanes [v, v + kVectors * kLanes) of a block of logits into their statistics and turns them
// into exp(x - max of the lane).
template <class T, int kVectors>
void exp_softmax_lanes(T* x, int64_t supers, int64_t lanes, int64_t v, T* max, T* sum) {
  Vector<T> new_max[kVectors], subtracted[kVectors], new_sum[kVectors];
  for (int j = 0; j < kVectors; ++j) new_max[j] = load(max + v + j * kLanes<T>);
  for (int64_t i = 0; i < supers; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      new_max[j] = vector_max<T>(load(x + i * lanes + v + j * kLanes<T>), new_max[j]);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    const int64_t at = v + j * kLanes<T>;
    subtracted[j] = finite_max<T>(new_max[j]);
    new_sum[j] = load(sum + at) * vector_exp<T>(load(max + at) - subtracted[j]);
    store<T>(max + at, new_max[j]);
  }
  for (int64_t i = 0; i < supers; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      T* at = x + i * lanes + v + j * kLanes<T>;
      const Vector<T> e = vector_exp<T>(load(at) - subtracted[j]);
      store<T>(at, e);
      new_sum[j] += e;
    }
  }
  for (int j = 0; j < kVectors; ++j) store<T>(sum + v + j * kLanes<T>, new_sum[j]);
}

template <class T>
void exp_softmax_block(T* x, int64_t supers, int64_t lanes, T* max, T* sum) {
  int64_t v = 0;
  for (; v + kSoftmaxVectors * kLanes<T> <= lanes; v += kSoftmaxVectors * kLanes<T>) {
    exp_softmax_lanes<T, kSoftmaxVectors>(x, supers, lanes, v, max, sum);
  }
  for (; v < lanes; v += kLanes<T>) exp_softmax_lanes<T, 1>(x, supers, lanes, v, max, sum);
}

// sum += grad * out of a block.
template <class T, int kVectors>
void dot_softmax_lanes(const T* out, const T* grad, int64_t supers, int64_t lanes, int64_t v,
                       T* sum) {
  Vector<T> total[kVectors];
  for (int j = 0; j < kVectors; ++j) total[j] = load(sum + v + j * kLanes<T>);
  for (int64_t i = 0; i < supers; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = i * lanes + v + j * kLanes<T>;
      total[j] += load(out + at) * load(grad + at);
    }
  }
  for (int j = 0; j < kVectors; ++j) store<T>(sum + v + j * kLanes<T>, total[j]);
}

template <class T>
void dot_softmax_block(const T* out, const T* grad, int64_t supers, int64_t lanes, T* sum) {
  int64_t v = 0;
  for (; v + kSoftmaxVectors * kLanes<T> <= lanes; v += kSoftmaxVectors * kLanes<T>) {
    dot_softmax_lanes<T, kSoftmaxVectors>(out, grad, supers, lanes, v, sum);
  }
  for (; v < lanes; v += kLanes<T>) dot_softmax_lanes<T, 1>(out, grad, supers, lanes, v, sum);
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

// Of all rows of an item, by lanes; leaves the last block in buffers.x (as exponentials) and
// buffers.grad.
template <class T>
void softmax_lane_statistics(const SoftmaxParams& p, const SoftmaxItem& item,
                             const SoftmaxLayout<T>& layout, const SoftmaxBuffers<T>& buffers) {
  std::fill_n(buffers.max, layout.lanes, p.backward ? T(0) : -std::numeric_limits<T>::infinity());
  std::fill_n(buffers.sum, layout.lanes, T(0));
  for (int64_t row = 0; row < item.rows; row += layout.block_rows) {
    const int64_t rows = std::min(layout.block_rows, item.rows - row);
    if (p.backward) {
      read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows, T(1), T(0),
                         buffers.x);
      read_softmax_block(layout, p.element, p.grad_out, p.grad_row_stride, item, row, rows, T(1),
                         T(0), buffers.grad);
      dot_softmax_block(buffers.x, buffers.grad, layout.supers(rows), layout.lanes, buffers.sum);
    } else {
      read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows, T(p.scale),
                         -std::numeric_limits<T>::infinity(), buffers.x);
      exp_softmax_block(buffers.x, layout.supers(rows), layout.lanes, buffers.max, buffers.sum);
    }
  }
}

// grad_in of a block, into `out`.
template <class T>
void softmax_grad_block(T* out, const T* grad, const T* sum, T scale, int64_t supers,
                        int64_t lanes) {
  for (int64_t i = 0; i < supers; ++i) {
    for (int64_t v = 0; v < lanes; v += kLanes<T>) {
      T* at = out + i * lanes + v;
      store<T>(at, load(at) * scale * (load(grad + i * lanes + v) - load(sum + v)));
    }
  }
}

template <class T>
void softmax_statistics(const SoftmaxParams& p, const SoftmaxItem& item, void* max, void* sum,
                        void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers(arena, p);
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
  const SoftmaxBuffers<T> buffers(arena, p);
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
    const int64_t supers = layout.supers(rows), lanes = layout.lanes;
    read_softmax_block(layout, p.element, p.x, p.x_row_stride, item, row, rows,
                       p.backward ? T(1) : T(p.scale), T(0), buffers.x);
    if (p.backward) {
      read_softmax_block(layout, p.element, p.grad_out, p.grad_row_stride, item, row, rows, T(1),
                         T(0), buffers.grad);
      softmax_grad_block(buffers.x, buffers.grad, buffers.sum, T(p.scale), supers, lanes);
    } else {
      for (int64_t i = 0; i < supers; ++i) {
        for (int64_t v = 0; v < lanes; v += kLanes<T>) {
          T* at = buffers.x + i * lanes + v;
          store<T>(at, vector_exp<T>(load(at) - load(buffers.max + v)) * load(buffers.sum + v));
        }
      }
    }
    write_softmax_block(layout, p, item, row, rows, buffers.x);
  }
}

template <class T>
void softmax(const SoftmaxParams& p, const SoftmaxItem& item, void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers(arena, p);
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
    softmax_grad_block(buffers.x, buffers.grad, buffers.sum, T(p.scale), supers, lanes);
  } else {
    for (int64_t v = 0; v < lanes; v += kLanes<T>) {
      Vector<T> factor = T(1) / load(buffers.sum + v);
      if (layout.rows_per_super > 1) {
        factor *= vector_exp<T>(load(buffers.lane_max + v) - finite_max<T>(load(buffers.max + v)));
      }
      store<T>(buffers.sum + v, factor);
    }
    for (int64_t i = 0; i < supers; ++i) {
      for (int64_t v = 0; v < lanes; v += kLanes<T>) {
        T* at = buffers.x + i * lanes + v;
        store<T>(at, load(at) * load(buffers.sum + v));
      }
    }
  }
  write_softmax_block(layout, p, item, 0, item.rows, buffers.x);
}
