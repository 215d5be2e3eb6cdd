// Rows between tensors (of any element type) and accumulators.

JAGGED_INLINE float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

JAGGED_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAGGED_INLINE float half_to_float(uint16_t half) {
  // Shifted into a float's fields the exponent is 112 too small; the product mends that for
  // subnormal numbers too.
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float magnitude = float_from_bits(shifted) * 0x1p112f;
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // infinity, NaN
  return float_from_bits(bits_of_float(magnitude) | special |
                         static_cast<uint32_t>(half & 0x8000) << 16);
}

// Rounds to nearest, ties to even.
JAGGED_INLINE uint16_t half_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // A sum with 0.5 leaves a multiple of 2^-24, the smallest half, in the low bits.
  const uint32_t subnormal = bits_of_float(float_from_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude >= 0x47800000u  ? special    // from 2^16: infinity or NaN
                        : magnitude < 0x38800000u ? subnormal  // below 2^-14
                                                  : normal;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

JAGGED_INLINE uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline void halves_to_floats(float* dst, const uint16_t* src, int64_t count) {
  int64_t i = 0;
#if JAGGED_F16C
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < count; ++i) dst[i] = half_to_float(src[i]);
}

inline void floats_to_halves(uint16_t* dst, const float* src, int64_t count) {
  int64_t i = 0;
#if JAGGED_F16C
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), halves);
  }
#endif
  for (; i < count; ++i) dst[i] = half_from_float(src[i]);
}

inline void bfloat16s_to_floats(float* dst, const uint16_t* src, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = float_from_bits(static_cast<uint32_t>(src[i]) << 16);
}

inline void floats_to_bfloat16s(uint16_t* dst, const float* src, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = bfloat16_from_float(src[i]);
}

// `count` elements at `src` as accumulators.
inline void load_elements(float* dst, const void* src, Element element, int64_t count) {
  if (count <= 0) return;
  if (element == Element::kFloat) {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  } else if (element == Element::kHalf) {
    halves_to_floats(dst, static_cast<const uint16_t*>(src), count);
  } else {
    bfloat16s_to_floats(dst, static_cast<const uint16_t*>(src), count);
  }
}

inline void load_elements(double* dst, const void* src, Element, int64_t count) {
  if (count > 0) std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(double));
}

inline void store_elements(void* dst, const float* src, Element element, int64_t count) {
  if (count <= 0) return;
  if (element == Element::kFloat) {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  } else if (element == Element::kHalf) {
    floats_to_halves(static_cast<uint16_t*>(dst), src, count);
  } else {
    floats_to_bfloat16s(static_cast<uint16_t*>(dst), src, count);
  }
}

inline void store_elements(void* dst, const double* src, Element, int64_t count) {
  if (count > 0) std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(double));
}

// Whether elements are accumulators already, so that tensors can be used in place.
template <class T>
constexpr bool is_accumulator(Element element) {
  return element == (sizeof(T) == 8 ? Element::kDouble : Element::kFloat);
}

inline const void* element_at(const void* data, Element element, int64_t index) {
  return static_cast<const char*>(data) + index * element_bytes(element);
}

inline void* element_at(void* data, Element element, int64_t index) {
  return static_cast<char*>(data) + index * element_bytes(element);
}

// dst [padded_rows, dst_row] from src [rows, columns]: columns up to a whole vector and rows up to
// padded_rows are 0.
template <class T>
void load_rows(T* dst, int64_t dst_row, const void* src, int64_t src_row, Element element,
               int64_t rows, int64_t padded_rows, int64_t columns) {
  const int64_t padded_columns = round_up(columns, kLanes<T>);
  for (int64_t row = 0; row < rows; ++row) {
    T* dst_begin = dst + row * dst_row;
    load_elements(dst_begin, element_at(src, element, row * src_row), element, columns);
    for (int64_t column = columns; column < padded_columns; ++column) dst_begin[column] = 0;
  }
  for (int64_t row = rows; row < padded_rows; ++row) {
    std::fill_n(dst + row * dst_row, padded_columns, T(0));
  }
}

// Multiplies [rows, columns] in place, whole vectors of a row at a time.
template <class T>
void scale_rows(T* data, int64_t row_stride, int64_t rows, int64_t columns, T factor) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kLanes<T>) {
      T* p = data + row * row_stride + column;
      store<T>(p, load(p) * factor);
    }
  }
}

// dst [columns, dst_row] = src [rows, columns] transposed, in tiles of 4 by 4: rows and columns are
// rounded up to multiples of 4, so both buffers must hold these.
inline void transpose(const float* src, int64_t src_row, int64_t rows, int64_t columns, float* dst,
                      int64_t dst_row) {
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
  typedef int32_t Lanes __attribute__((vector_size(16)));
  constexpr Lanes kLow = {0, 4, 1, 5}, kHigh = {2, 6, 3, 7};
  for (int64_t row = 0; row < rows; row += 4) {
    for (int64_t column = 0; column < columns; column += 4) {
      const float* from = src + row * src_row + column;
      const Four a = *reinterpret_cast<const Four*>(from);
      const Four b = *reinterpret_cast<const Four*>(from + src_row);
      const Four c = *reinterpret_cast<const Four*>(from + 2 * src_row);
      const Four d = *reinterpret_cast<const Four*>(from + 3 * src_row);
      const Four ac_low = __builtin_shuffle(a, c, kLow), ac_high = __builtin_shuffle(a, c, kHigh);
      const Four bd_low = __builtin_shuffle(b, d, kLow), bd_high = __builtin_shuffle(b, d, kHigh);
      float* to = dst + column * dst_row + row;
      *reinterpret_cast<Four*>(to) = __builtin_shuffle(ac_low, bd_low, kLow);
      *reinterpret_cast<Four*>(to + dst_row) = __builtin_shuffle(ac_low, bd_low, kHigh);
      *reinterpret_cast<Four*>(to + 2 * dst_row) = __builtin_shuffle(ac_high, bd_high, kLow);
      *reinterpret_cast<Four*>(to + 3 * dst_row) = __builtin_shuffle(ac_high, bd_high, kHigh);
    }
  }
}

inline void transpose(const double* src, int64_t src_row, int64_t rows, int64_t columns,
                      double* dst, int64_t dst_row) {
  const int64_t padded_rows = round_up(rows, 4);
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < padded_rows; ++row) {
      dst[column * dst_row + row] = src[row * src_row + column];
    }
  }
}
