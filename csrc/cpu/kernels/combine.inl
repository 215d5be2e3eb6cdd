// jagged_dense_add and jagged_dense_mul: two runs of elements, combined one by one. What are not
// accumulators already is converted in blocks.

template <class T>
void combine_block(Combine combine, const T* x, const T* y, T* out, int64_t count) {
  if (combine == Combine::kAdd) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] + y[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * y[i];
  }
}

template <class T>
void combine_elements(Element element, Combine combine, const void* x, const void* y, void* out,
                      int64_t count) {
  if (is_accumulator<T>(element)) {
    combine_block(combine, static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out),
                  count);
    return;
  }
  constexpr int64_t kBlock = 512;
  T x_block[kBlock], y_block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    load_elements(x_block, element_at(x, element, begin), element, block);
    load_elements(y_block, element_at(y, element, begin), element, block);
    combine_block(combine, x_block, y_block, x_block, block);
    store_elements(element_at(out, element, begin), x_block, element, block);
  }
}
