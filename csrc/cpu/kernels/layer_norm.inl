// layer_norm_mul_dropout, row by row, in accumulators:
//
//   xhat = (x - mean) rstd      out = keep u (xhat weight + bias)
//
// Backward, with g = keep grad_out, h = g u weight and means over the row:
//
//   du = g (xhat weight + bias)     dx = rstd (h - mean(h) - xhat mean(h xhat))
//   dweight = sum of g u xhat       dbias = sum of g u
//
// Rows of scratch are filled up with zeros to whole vectors.

// The sum of f(i) over whole vectors from column i on.
template <class T, class F>
JAGGED_INLINE T sum_columns(int64_t padded, const F& f) {
  Vector<T> sums = broadcast<T>(0);
  for (int64_t i = 0; i < padded; i += kLanes<T>) sums += f(i);
  return reduce_sum<T>(sums);
}

// x becomes xhat; 1 / standard deviation is returned.
template <class T>
T normalise(T* x, int64_t columns, double eps) {
  const int64_t padded = round_up(columns, kLanes<T>);
  const T count = static_cast<T>(columns);
  const T mean = sum_columns<T>(padded, [&](int64_t i) { return load(x + i); }) / count;
  for (int64_t i = 0; i < columns; ++i) x[i] -= mean;
  const T squares = sum_columns<T>(padded, [&](int64_t i) { return load(x + i) * load(x + i); });
  const T rstd = T(1) / std::sqrt(squares / count + static_cast<T>(eps));
  for (int64_t i = 0; i < columns; ++i) x[i] *= rstd;
  return rstd;
}

// What the elements of a row are multiplied by: 0, or kept_scale.
template <class T>
void draw_keep(T* keep, const LayerNormParams& p, int64_t row) {
  if (!p.dropout.drops) {
    std::fill_n(keep, p.columns, T(1));
    return;
  }
  const T scale = static_cast<T>(p.dropout.kept_scale);
  constexpr int kBlocks = 8;
  constexpr int64_t kColumns = kBlocks * kDropoutColumns;
  for (int64_t column = 0; column < p.columns; column += kColumns) {
    DropoutPlace places[kBlocks];
    for (int i = 0; i < kBlocks; ++i) places[i] = {row, column / kDropoutColumns + i};
    uint32_t words[kBlocks][kDropoutWords];
    dropout_words(words, p.seed, places);
    const int count = static_cast<int>(std::min(kColumns, p.columns - column));
    for (int i = 0; i < count; ++i) {
      const uint32_t word = words[i / kDropoutColumns][i % kDropoutColumns / 2];
      keep[column + i] = dropout_half(word, i) <= p.dropout.drop_up_to ? T(0) : scale;
    }
  }
}

template <class T>
void load_layer_norm_row(T* dst, const LayerNormParams& p, const void* data, int64_t stride,
                         int64_t row) {
  load_line(dst, data, p.element, row * stride, p.columns, T(0));
}

template <class T>
void layer_norm(const LayerNormParams& p, const LayerNormItem& item, void* scratch) {
  Arena arena(scratch);
  const LayerNormBuffers<T> buffers{arena, p};
  const T* weight = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  T *x = buffers.x, *u = buffers.u, *keep = buffers.keep, *out = buffers.out;
  for (int64_t row = item.begin; row < item.begin + item.rows; ++row) {
    load_layer_norm_row(x, p, p.x, p.x_row_stride, row);
    load_layer_norm_row(u, p, p.u, p.u_row_stride, row);
    normalise(x, p.columns, p.eps);
    draw_keep(keep, p, row);
    for (int64_t i = 0; i < p.columns; ++i) {
      const T result = u[i] * (x[i] * weight[i] + bias[i]) * keep[i];
      out[i] = keep[i] == T(0) ? T(0) : result;
    }
    store_elements(element_at(p.out, p.element, row * p.columns), out, p.element, p.columns);
  }
}

template <class T>
void layer_norm_backward(const LayerNormParams& p, const LayerNormItem& item, void* grad_weight,
                         void* grad_bias, void* scratch) {
  Arena arena(scratch);
  const LayerNormBuffers<T> buffers{arena, p};
  const int64_t padded = round_up(p.columns, kLanes<T>);
  const T count = static_cast<T>(p.columns);
  const T* weight = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  T *x = buffers.x, *u = buffers.u, *keep = buffers.keep, *out = buffers.out, *grad = buffers.grad;
  T* weight_sums = static_cast<T*>(grad_weight);
  T* bias_sums = static_cast<T*>(grad_bias);
  std::fill_n(weight_sums, p.columns, T(0));
  std::fill_n(bias_sums, p.columns, T(0));
  for (int64_t row = item.begin; row < item.begin + item.rows; ++row) {
    load_layer_norm_row(x, p, p.x, p.x_row_stride, row);
    load_layer_norm_row(u, p, p.u, p.u_row_stride, row);
    load_layer_norm_row(grad, p, p.grad_out, p.grad_row_stride, row);
    const T rstd = normalise(x, p.columns, p.eps);
    draw_keep(keep, p, row);
    for (int64_t i = 0; i < p.columns; ++i) {
      const T kept = keep[i] == T(0) ? T(0) : grad[i] * keep[i];
      const T product = kept * u[i];
      out[i] = kept * (x[i] * weight[i] + bias[i]);
      weight_sums[i] += product * x[i];
      bias_sums[i] += product;
      u[i] = product * weight[i];  // h
    }
    store_elements(element_at(p.grad_u, p.element, row * p.columns), out, p.element, p.columns);
    const T mean_h = sum_columns<T>(padded, [&](int64_t i) { return load(u + i); }) / count;
    const T mean_hx =
        sum_columns<T>(padded, [&](int64_t i) { return load(u + i) * load(x + i); }) / count;
    for (int64_t i = 0; i < p.columns; ++i) out[i] = rstd * (u[i] - mean_h - x[i] * mean_hx);
    store_elements(element_at(p.grad_x, p.element, row * p.columns), out, p.element, p.columns);
  }
}
