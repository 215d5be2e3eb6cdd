// jagged_dense_bmm and jagged_jagged_bmm.

// y [depth, columns] of one sequence into whole vectors of columns.
template <class T>
void pack_y(const DenseBmmParams& p, int64_t seq, int64_t row_begin, int64_t rows,
            int64_t column_begin, int64_t columns, T* dst, int64_t dst_row) {
  const void* y = element_at(
      p.y, p.element,
      seq * p.y_seq_stride + row_begin * p.y_row_stride + column_begin * p.y_column_stride);
  if (p.y_column_stride == 1 || columns == 1) {
    load_rows(dst, dst_row, y, p.y_row_stride, p.element, rows, rows, columns);
    return;
  }
  // Columns are contiguous: pieces of some columns are transposed.
  constexpr int64_t kPieceColumns = 32, kPieceRows = 64;
  constexpr int64_t kPieceRow = padded_row(kPieceRows);
  alignas(64) T piece[kPieceColumns * kPieceRow];
  for (int64_t column = 0; column < columns; column += kPieceColumns) {
    const int64_t piece_columns = std::min(kPieceColumns, columns - column);
    const int64_t padded_columns = round_up(piece_columns, std::max<int64_t>(4, kLanes<T>));
    for (int64_t row = 0; row < rows; row += kPieceRows) {
      const int64_t piece_rows = std::min(kPieceRows, rows - row);
      load_rows(piece, kPieceRow, element_at(y, p.element, column * p.y_column_stride + row),
                p.y_column_stride, p.element, piece_columns, padded_columns, piece_rows);
      transpose(piece, kPieceRow, round_up(piece_columns, kLanes<T>), piece_rows,
                dst + row * dst_row + column, dst_row);
    }
  }
}

template <class T>
JAGGED_INLINE Vector<T> vector_sigmoid(Vector<T> x) {
  return T(1) / (T(1) + vector_exp<T>(-x));
}

// A function of each lane.
template <class T, class Function>
JAGGED_INLINE Vector<T> each_lane(Vector<T> x, Function function) {
  for (int64_t i = 0; i < kLanes<T>; ++i) x[i] = function(x[i]);
  return x;
}

JAGGED_INLINE Vector<double> vector_tanh(Vector<double> x) {
  return each_lane<double>(x, [](double lane) { return std::tanh(lane); });
}

JAGGED_INLINE Vector<float> vector_tanh(Vector<float> x) {
  const Vector<float> size = x < 0.0f ? -x : x;
  const Vector<float> power = vector_exp<float>(-2.0f * size);
  const Vector<float> quotient = (1.0f - power) / (1.0f + power);
  // Near 0 the difference loses its digits: x - x^3 / 3 is exact there.
  const Vector<float> cubic = x - x * x * x * (1.0f / 3.0f);
  return size < 0.03f ? cubic : x < 0.0f ? -quotient : quotient;
}

// The share of a normal distribution that lies below x: (1 + erf(x / sqrt 2)) / 2.
JAGGED_INLINE Vector<double> vector_normal_share(Vector<double> x) {
  return each_lane<double>(
      x, [](double lane) { return 0.5 * (1 + std::erf(lane * 0.7071067811865476)); });
}

// By formula 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions", for erfc: its
// error of 1.5e-7 is a rounding of float.
JAGGED_INLINE Vector<float> vector_normal_share(Vector<float> x) {
  const Vector<float> z = (x < 0.0f ? -x : x) * 0.70710678f;
  const Vector<float> t = 1.0f / (1.0f + 0.3275911f * z);
  const Vector<float> poly =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
       0.254829592f) *
      t;
  const Vector<float> tail = 0.5f * poly * vector_exp<float>(-z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}

// out [rows, columns] = activate(out + bias), in place and in whole vectors; bias may be null.
template <class T, class Activate>
void finish_rows(T* out, int64_t out_row, int64_t rows, int64_t columns, const T* bias,
                 Activate activate) {
  for (int64_t row = 0; row < rows; ++row) {
    T* line = out + row * out_row;
    for (int64_t i = 0; i < columns; i += kLanes<T>) {
      const Vector<T> sum = load(line + i);
      store<T>(line + i, activate(bias != nullptr ? sum + load(bias + i) : sum));
    }
  }
}

template <class T>
void finish_rows(T* out, int64_t out_row, int64_t rows, int64_t columns, const T* bias,
                 Activation activation) {
  const auto finish = [&](auto activate) {
    finish_rows(out, out_row, rows, columns, bias, activate);
  };
  switch (activation) {
    case Activation::kNone:
      if (bias != nullptr) finish([](Vector<T> z) { return z; });
      return;
    case Activation::kRelu:
      return finish([](Vector<T> z) { return z < T(0) ? broadcast<T>(0) : z; });  // NaN stays
    case Activation::kGelu:
      return finish([](Vector<T> z) { return z * vector_normal_share(z); });
    case Activation::kSilu:
      return finish([](Vector<T> z) { return z * vector_sigmoid<T>(z); });
    case Activation::kSigmoid:
      return finish([](Vector<T> z) { return vector_sigmoid<T>(z); });
    case Activation::kTanh:
      return finish([](Vector<T> z) { return vector_tanh(z); });
  }
}

// Operands are used in place where they are accumulators and whole vectors of columns, else from
// converted blocks.
template <class T>
void dense_bmm(const DenseBmmParams& p, const DenseBmmItem& item, void* scratch) {
  Arena arena(scratch);
  const DenseBmmBuffers<T> buffers{arena, p};
  const bool in_place = is_accumulator<T>(p.element);
  const bool whole_vectors = p.columns % kLanes<T> == 0;
  const bool y_in_place = in_place && whole_vectors && p.y_column_stride == 1 &&
                          (p.y_row_stride <= 2 * kLanes<T> || item.rows <= kOneVectorRows);
  const bool out_in_place = in_place && whole_vectors;
  const int64_t depth_blocks = std::max<int64_t>(1, (p.inner + kDenseDepth - 1) / kDenseDepth);

  for (int64_t column = 0; column < p.columns; column += kDenseColumns) {
    const int64_t columns = std::min(kDenseColumns, p.columns - column);
    void* out = element_at(p.out, p.element, item.begin * p.columns + column);
    for (int64_t block = 0; block < depth_blocks; ++block) {
      const int64_t inner = block * kDenseDepth;
      const int64_t depth = std::min(kDenseDepth, p.inner - inner);
      Product<T> product{};
      product.rows = item.rows;
      product.columns = round_up(columns, kLanes<T>);
      product.depth = depth;
      const void* x = element_at(p.x, p.element, item.begin * p.x_row_stride + inner);
      product.a_step = 1;
      if (in_place) {
        product.a = static_cast<const T*>(x);
        product.a_row = p.x_row_stride;
      } else {
        load_rows(buffers.x, buffers.x_row, x, p.x_row_stride, p.element, item.rows, item.rows,
                  depth);
        product.a = buffers.x;
        product.a_row = buffers.x_row;
      }
      if (y_in_place) {
        product.b = static_cast<const T*>(p.y) + item.seq * p.y_seq_stride +
                    inner * p.y_row_stride + column;
        product.b_row = p.y_row_stride;
      } else {
        pack_y(p, item.seq, inner, depth, column, columns, buffers.y, buffers.y_row);
        product.b = buffers.y;
        product.b_row = buffers.y_row;
      }
      product.c = out_in_place ? static_cast<T*>(out) : buffers.out;
      product.c_row = out_in_place ? p.columns : buffers.y_row;
      product.add = block > 0;
      multiply(product);
    }
    if (p.bias != nullptr) {
      const int64_t first = item.seq * p.bias_stride + column;
      load_elements(buffers.bias, element_at(p.bias, p.element, first), p.element, columns);
    }
    finish_rows(out_in_place ? static_cast<T*>(out) : buffers.out,
                out_in_place ? p.columns : buffers.y_row, item.rows, columns,
                p.bias != nullptr ? buffers.bias : nullptr, p.activation);
    if (!out_in_place) {
      for (int64_t row = 0; row < item.rows; ++row) {
        store_elements(element_at(out, p.element, row * p.columns),
                       buffers.out + row * buffers.y_row, p.element, columns);
      }
    }
  }
}

// out [narrow_columns, wide_columns], at columns i and j of the operands, into the item's result.
template <class T>
void store_jagged_out(const JaggedBmmParams& p, const JaggedBmmItem& item, const T* out,
                      bool x_is_wide, int64_t i, int64_t narrow_columns, int64_t j,
                      int64_t wide_columns) {
  constexpr int64_t kWideRow = padded_row(kJaggedWide);
  const Element accumulator = sizeof(T) == 8 ? Element::kDouble : Element::kFloat;
  const Element element = item.out_is_accum ? accumulator : p.element;
  if (!x_is_wide) {
    for (int64_t row = 0; row < narrow_columns; ++row) {
      store_elements(element_at(item.out, element, (i + row) * p.y_columns + j),
                     out + row * kWideRow, element, wide_columns);
    }
    return;
  }
  T line[kJaggedNarrow];
  for (int64_t row = 0; row < wide_columns; ++row) {
    for (int64_t column = 0; column < narrow_columns; ++column) {
      line[column] = out[column * kWideRow + row];
    }
    store_elements(element_at(item.out, element, (j + row) * p.y_columns + i), line, element,
                   narrow_columns);
  }
}

// Vectors run along the columns of the wider operand, so that 8 columns against 256 fill them;
// where that is x, tiles are transposed as they are stored.
template <class T>
void jagged_bmm(const JaggedBmmParams& p, const JaggedBmmItem& item, void* scratch) {
  Arena arena(scratch);
  const JaggedBmmBuffers<T> buffers{arena, p};
  const bool is_accum = is_accumulator<T>(p.element);
  const bool x_is_wide = p.x_columns > p.y_columns;
  struct Operand {
    const void* data;
    int64_t row_stride, begin, end;
  };
  const Operand x = {p.x, p.x_row_stride, item.x_begin, item.x_end};
  const Operand y = {p.y, p.y_row_stride, item.y_begin, item.y_end};
  const Operand& narrow = x_is_wide ? y : x;
  const Operand& wide = x_is_wide ? x : y;
  constexpr int64_t kNarrowRow = padded_row(kJaggedNarrow), kWideRow = padded_row(kJaggedWide);

  // Blocks that are used several times are worth a copy if the tensor's rows are far apart: lines
  // of a column would compete for the same part of the cache.
  const bool few = narrow.end - narrow.begin <= 2 * kFewRows;
  const int64_t block_depth = few ? kJaggedDepthFew : kJaggedDepth;
  const auto in_place = [&](const Operand& operand) {
    return is_accum && (few || operand.row_stride <= kJaggedCompactRow);
  };

  for (int64_t j = wide.begin; j < wide.end; j += kJaggedWide) {
    const int64_t wide_columns = std::min(kJaggedWide, wide.end - j);
    const bool whole_vectors = wide_columns % kLanes<T> == 0;
    const bool out_in_place = !x_is_wide && whole_vectors && (is_accum || item.out_is_accum);
    const int64_t step = out_in_place ? narrow.end - narrow.begin : kJaggedNarrow;
    for (int64_t i = narrow.begin; i < narrow.end; i += step) {
      const int64_t narrow_columns = std::min(step, narrow.end - i);
      T* out = out_in_place ? static_cast<T*>(item.out) + i * p.y_columns + j : buffers.out;
      Product<T> product{};
      product.columns = round_up(wide_columns, kLanes<T>);
      product.a_row = 1;
      product.c_row = out_in_place ? p.y_columns : kWideRow;
      // At least one round, which writes zeros if there are no rows.
      for (int64_t row = 0; row == 0 || row < item.rows; row += block_depth) {
        product.depth = std::min(block_depth, item.rows - row);
        product.add = row > 0;
        const int64_t begin = item.begin + row;
        const void* b = element_at(wide.data, p.element, begin * wide.row_stride + j);
        if (in_place(wide) && whole_vectors) {
          product.b = static_cast<const T*>(b);
          product.b_row = wide.row_stride;
        } else {
          load_rows(buffers.wide, kWideRow, b, wide.row_stride, p.element, product.depth,
                    product.depth, wide_columns);
          product.b = buffers.wide;
          product.b_row = kWideRow;
        }
        for (int64_t part = 0; part < narrow_columns; part += kJaggedNarrow) {
          product.rows = std::min(kJaggedNarrow, narrow_columns - part);
          product.c = out + part * product.c_row;
          const void* a = element_at(narrow.data, p.element, begin * narrow.row_stride + i + part);
          if (in_place(narrow)) {
            product.a = static_cast<const T*>(a);
            product.a_step = narrow.row_stride;
          } else {
            load_rows(buffers.narrow, kNarrowRow, a, narrow.row_stride, p.element, product.depth,
                      product.depth, product.rows);
            product.a = buffers.narrow;
            product.a_step = kNarrowRow;
          }
          multiply(product);
        }
      }
      if (!out_in_place) {
        store_jagged_out(p, item, buffers.out, x_is_wide, i, narrow_columns, j, wide_columns);
      }
    }
  }
}

template <class T>
void sum_parts(Element element, void* out, void* sums, int64_t parts, int64_t count) {
  T* total = static_cast<T*>(sums);
  for (int64_t part = 1; part < parts; ++part) {
    const T* other = total + part * count;
    for (int64_t i = 0; i < count; ++i) total[i] += other[i];
  }
  store_elements(out, total, element, count);
}
