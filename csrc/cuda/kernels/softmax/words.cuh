// Words of 4 bytes of a vector: two 16-bit elements, the first in the low half, or one float.
//
// Forward sums of 16-bit elements are made of integers: 2 + e has e, at most 1, in multiples of
// 2^-22 in its last bits. So a line's sum does not depend on which thread adds what, and a matrix
// has the same result wherever it begins.
#pragma once

#include "cuda/kernels/prim/global_word.cuh"
#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

template <typename Element>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(Element));

// A word whose elements are -inf.
template <typename Element>
constexpr uint32_t kMinusInfinities = std::is_same_v<Element, __half>          ? 0xfc00fc00u
                                      : std::is_same_v<Element, __nv_bfloat16> ? 0xff80ff80u
                                                                               : 0xff800000u;

// Element `i` of a word.
template <typename Element>
__device__ __forceinline__ float element_of(uint32_t word, int i) {
  if constexpr (std::is_same_v<Element, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i == 0 ? word : word >> 16)));
  } else {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  }
}

template <typename Element>
__device__ __forceinline__ uint32_t word_of(const float (&elems)[kPerWord<Element>]) {
  if constexpr (std::is_same_v<Element, float>) {
    return __float_as_uint(elems[0]);
  } else {
    return pack<Element>(elems[0], elems[1]);
  }
}

// Element by element the larger one; NaN if either is.
template <typename Element>
__device__ __forceinline__ uint32_t largest_of_words(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<Element, float>) {
    return __float_as_uint(ptx::max_nan(__uint_as_float(a), __uint_as_float(b)));
  } else {
    return ptx::max_nan_x2<Element>(a, b);
  }
}

// The largest element of a word; NaN if one is.
template <typename Element>
__device__ __forceinline__ float largest_element(uint32_t word) {
  const float first = element_of<Element>(word, 0);
  if constexpr (kPerWord<Element> == 1) {
    return first;
  } else {
    return ptx::max_nan(first, element_of<Element>(word, 1));
  }
}

// What logits are multiplied by in the exponent of 2; backward, what gradients are multiplied by.
template <typename Params>
__device__ __forceinline__ float factor_of(const Params& params) {
  return static_cast<float>(params.scale * (Operands<Params>::kBackward ? 1 : kLog2E));
}

// What is taken off each logit: NaN for a line that has NaN or +inf, or -inf alone, as in torch.
__device__ __forceinline__ float shift_of(float maximum) { return maximum + (maximum - maximum); }

// Terms of a line that are added as integers. Each is off by up to 2^-23, all of them to one side if they
// are alike, which f16 bears of 8,192; a part of 1,022 terms has 32 bits.
constexpr int kMaxCountedTerms = 8 * 1'022;

// 1 / a sum of exponentials, in multiples of 2^-22.
template <typename Count>
__device__ __forceinline__ float reciprocal_of_count(Count count) {
  return reciprocal(static_cast<float>(count) * 0x1p-22f);
}

// A forward sum of exponentials of at most 1: of 16-bit elements, of at most 1,023 terms, an
// integer to which 2^30 was added with each. Thus a multiple of four terms must be added, e = 0
// among them.
template <typename Element>
struct SumOfExponentials {
  static constexpr bool kInteger = sizeof(Element) == 2;
  std::conditional_t<kInteger, uint32_t, Sum<Element>> value{};

  __device__ __forceinline__ void add(Sum<Element> e) {
    if constexpr (kInteger) {
      value += __float_as_uint(e + 2.0f);
    } else {
      value += e;
    }
  }
  __device__ __forceinline__ Sum<Element> inverse() const {
    if constexpr (kInteger) {
      return reciprocal_of_count(value);
    } else {
      return reciprocal(value);
    }
  }
};

// Forward: the result for each element of a word, where maximum_of(e) is what is taken off in its line and
// inverse_of(e) 1 / the line's sum.
template <typename Element, typename MaximumOf, typename InverseOf>
__device__ __forceinline__ uint32_t probability_word(uint32_t x, const Scale<float>& scale,
                                                     MaximumOf maximum_of, InverseOf inverse_of) {
  float result[kPerWord<Element>];
#pragma unroll
  for (int e = 0; e < kPerWord<Element>; ++e) {
    result[e] = scale.exponential(element_of<Element>(x, e), maximum_of(e)) * inverse_of(e);
  }
  return word_of<Element>(result);
}

// Backward: sum += p dp for each element of a word, of which each is of a line of its own.
template <typename Element>
__device__ __forceinline__ void add_products(float (&sum)[kPerWord<Element>], uint32_t p,
                                             uint32_t grad) {
#pragma unroll
  for (int e = 0; e < kPerWord<Element>; ++e) {
    sum[e] = fmaf(element_of<Element>(p, e), element_of<Element>(grad, e), sum[e]);
  }
}
// The same of elements of one line.
template <typename Element>
__device__ __forceinline__ void add_products(float& sum, uint32_t p, uint32_t grad) {
#pragma unroll
  for (int e = 0; e < kPerWord<Element>; ++e) {
    sum = fmaf(element_of<Element>(p, e), element_of<Element>(grad, e), sum);
  }
}

// Backward: factor p (dp - sum) for each element, where sum_of(e) is the sum of p dp over its line.
template <typename Element, typename SumOf>
__device__ __forceinline__ uint32_t gradient_word(uint32_t p, uint32_t grad, float factor,
                                                  SumOf sum_of) {
  float result[kPerWord<Element>];
#pragma unroll
  for (int e = 0; e < kPerWord<Element>; ++e) {
    result[e] = factor * element_of<Element>(p, e) * (element_of<Element>(grad, e) - sum_of(e));
  }
  return word_of<Element>(result);
}

}  // namespace jagged_cuda::softmax
