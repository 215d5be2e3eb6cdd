// jagged2_softmax over columns: lines of elements one after another, each with a softmax of its
// own. A line that is longer than a block is read twice.

// `count` elements as accumulators, filled up to whole vectors.
template <class T>
void load_line(T* dst, const void* data, Element element, int64_t index, int64_t count, T filler) {
  load_elements(dst, element_at(data, element, index), element, count);
  std::fill(dst + count, dst + round_up(count, kLanes<T>), filler);
}

// x = exp(scale * x - max) with the maximum of the block, which is returned with the sum.
template <class T>
void exp_line(T* x, int64_t count, T scale, T& max, T& sum) {
  const int64_t padded = round_up(count, kLanes<T>);
  Vector<T> maxima = broadcast<T>(-std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
  for (int64_t i = 0; i < padded; i += kLanes<T>) maxima = vector_max<T>(load(x + i), maxima);
  max = reduce_max<T>(maxima);
  const Vector<T> subtracted = finite_max<T>(broadcast(max));
  Vector<T> sums = broadcast<T>(0);
  for (int64_t i = 0; i < padded; i += kLanes<T>) {
    const Vector<T> e = vector_exp<T>(load(x + i) - subtracted);
    store<T>(x + i, e);
    sums += e;
  }
  sum = reduce_sum<T>(sums);
}

template <class T>
void scale_line(T* x, int64_t count, T factor) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store<T>(x + i, load(x + i) * factor);
}

template <class T>
void softmax_line(const SoftmaxParams& p, int64_t begin, int64_t len,
                  const SoftmaxBuffers<T>& buffers) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const T scale = static_cast<T>(p.scale);
  const auto load_block = [&](int64_t first, int64_t count) {
    load_line(buffers.x, p.x, p.element, begin + first, count, -kInfinity);
  };
  T max = -kInfinity, sum = 0;
  for (int64_t first = 0; first < len; first += kSoftmaxBlock) {
    const int64_t count = std::min(kSoftmaxBlock, len - first);
    T block_max, block_sum;
    load_block(first, count);
    exp_line(buffers.x, count, scale, block_max, block_sum);
    const T larger = scalar_max(max, block_max);
    const T subtracted = larger == -kInfinity ? T(0) : larger;
    sum = (max == larger ? sum : sum * std::exp(max - subtracted)) +
          (block_max == larger ? block_sum : block_sum * std::exp(block_max - subtracted));
    max = larger;
  }
  if (len <= kSoftmaxBlock) {  // it is still there
    scale_line(buffers.x, len, T(1) / sum);
    store_elements(element_at(p.out, p.element, begin), buffers.x, p.element, len);
    return;
  }
  const Vector<T> subtracted = finite_max<T>(broadcast(max));
  for (int64_t first = 0; first < len; first += kSoftmaxBlock) {
    const int64_t count = std::min(kSoftmaxBlock, len - first);
    load_block(first, count);
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const Vector<T> e = vector_exp<T>(load(buffers.x + i) * scale - subtracted);
      store<T>(buffers.x + i, e * (T(1) / sum));
    }
    store_elements(element_at(p.out, p.element, begin + first), buffers.x, p.element, count);
  }
}

template <class T>
void softmax_line_backward(const SoftmaxParams& p, int64_t begin, int64_t len,
                           const SoftmaxBuffers<T>& buffers) {
  const auto load_block = [&](int64_t first, int64_t count) {
    load_line(buffers.x, p.x, p.element, begin + first, count, T(0));
    load_line(buffers.grad, p.grad_out, p.element, begin + first, count, T(0));
  };
  T dot = 0;
  for (int64_t first = 0; first < len; first += kSoftmaxBlock) {
    const int64_t count = std::min(kSoftmaxBlock, len - first);
    load_block(first, count);
    Vector<T> sums = broadcast<T>(0);
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      sums += load(buffers.x + i) * load(buffers.grad + i);
    }
    dot += reduce_sum<T>(sums);
  }
  const T scale = static_cast<T>(p.scale);
  for (int64_t first = 0; first < len; first += kSoftmaxBlock) {
    const int64_t count = std::min(kSoftmaxBlock, len - first);
    if (len > kSoftmaxBlock) load_block(first, count);
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const Vector<T> centered = load(buffers.grad + i) - dot;
      store<T>(buffers.x + i, load(buffers.x + i) * scale * centered);
    }
    store_elements(element_at(p.out, p.element, begin + first), buffers.x, p.element, count);
  }
}

template <class T>
void softmax_lines(const SoftmaxParams& p, const SoftmaxLinesItem& item, void* scratch) {
  Arena arena(scratch);
  const SoftmaxBuffers<T> buffers{arena, p};
  for (int64_t line = 0; line < item.lines; ++line) {
    const int64_t begin = item.begin + line * item.len;
    if (p.backward) {
      softmax_line_backward(p, begin, item.len, buffers);
    } else {
      softmax_line(p, begin, item.len, buffers);
    }
  }
}
