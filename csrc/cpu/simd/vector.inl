// Vectors of kVectorBytes, on the compiler's vector extension: T is float or double.

template <class T>
struct VectorTypes {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef Bits BitsVector __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};

template <class T>
using Vector = typename VectorTypes<T>::Vector;

template <class T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <class T>
JAGGED_INLINE Vector<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorTypes<T>::Unaligned*>(p);
}

template <class T>
JAGGED_INLINE void store(T* p, Vector<T> x) {
  *reinterpret_cast<typename VectorTypes<T>::Unaligned*>(p) = x;
}

template <class T>
JAGGED_INLINE Vector<T> broadcast(T x) {
  return x - Vector<T>{};
}

// The larger of both; a NaN in `a` is passed over, one in `b` kept.
template <class T>
JAGGED_INLINE Vector<T> vector_max(Vector<T> a, Vector<T> b) {
  return a > b ? a : b;
}

template <class T>
T scalar_max(T a, T b) {
  return a > b ? a : b;
}

// The sum of all lanes, always in the same order.
template <class T>
JAGGED_INLINE T reduce_sum(Vector<T> x) {
  T lanes[kLanes<T>];
  store(lanes, x);
  for (int64_t width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <class T>
JAGGED_INLINE T reduce_max(Vector<T> x) {
  T lanes[kLanes<T>];
  store(lanes, x);
  for (int64_t width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] = scalar_max(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2, where the Taylor polynomial is
// exact to a small part of an ulp (degree 7 for float, 13 for double).
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr int kDegree = 7, kMantissaBits = 23;
  static constexpr uint32_t kExponentBias = 127;
  static constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding it rounds to integers
  static constexpr float kLn2High = 0.693359375f;    // few bits: n * kLn2High is exact
  static constexpr float kLn2Low = -2.12194440e-4f;  // ln 2 - kLn2High
  static constexpr float kLowest = -87.0f, kHighest = 89.0f;  // below 0, above infinity
};

template <>
struct ExpConstants<double> {
  static constexpr int kDegree = 13, kMantissaBits = 52;
  static constexpr uint64_t kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.693145751953125;
  static constexpr double kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kLowest = -708.0, kHighest = 710.0;
};

// Exactly 0 below kLowest (for -inf above all); a NaN stays one.
template <class T>
JAGGED_INLINE Vector<T> vector_exp(Vector<T> x) {
  using C = ExpConstants<T>;
  using BitsVector = typename VectorTypes<T>::BitsVector;
  const Vector<T> clamped = x > C::kHighest ? broadcast<T>(C::kHighest) : x;
  const Vector<T> rounded = clamped * T(1.4426950408889634) + C::kRound;
  const Vector<T> n = rounded - C::kRound;
  const Vector<T> r = (clamped - n * C::kLn2High) - n * C::kLn2Low;
  T factorial = 1;
  for (int i = 2; i <= C::kDegree; ++i) factorial *= i;
  Vector<T> poly = broadcast<T>(1 / factorial);
#pragma GCC unroll 16
  for (int i = C::kDegree; i > 0; --i) {
    factorial /= i;
    poly = poly * r + 1 / factorial;
  }
  // The low bits of `rounded` hold n.
  const BitsVector power =
      ((BitsVector)rounded << C::kMantissaBits) + (C::kExponentBias << C::kMantissaBits);
  return x < C::kLowest ? broadcast<T>(0) : poly * (Vector<T>)power;
}
