// One line of a softmax, forward and backward, and the operands of both passes.
//
//   p_i  = exp(scale x_i - m) / sum_j exp(scale x_j - m)    with m = max_j scale x_j
//   dx_i = scale p_i (dp_i - sum_j dp_j p_j)
#pragma once

#include "cuda/kernels/jagged2_softmax.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <climits>
#include <cmath>

namespace jagged_cuda::softmax {

__device__ __forceinline__ float exponential(float x) {
  return ptx::ex2_approx(x * 1.44269504f);  // log2(e)
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float largest(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double largest(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ float reciprocal(float x) { return ptx::rcp_approx(x); }
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr double kLog2E = 1.4426950408889634;

template <typename S>
__device__ __forceinline__ S minus_infinity() {
  return -INFINITY;
}

// What is to be taken from logits whose largest is `maximum`: any finite number while all are -inf,
// where -inf would make their exponentials NaN.
template <typename S>
__device__ __forceinline__ S finite(S maximum) {
  return maximum == minus_infinity<S>() ? S(0) : maximum;
}

__device__ __forceinline__ int divide_up(int a, int b) {
  return static_cast<int>((static_cast<unsigned>(a) + b - 1) / static_cast<unsigned>(b));
}

// The same in 64 bits, by the short way where both fit.
__device__ __forceinline__ int64_t divide_up(int64_t a, int64_t b) {
  if (a <= INT_MAX && b <= INT_MAX) return divide_up(static_cast<int>(a), static_cast<int>(b));
  return (a + b - 1) / b;
}

// Running maximum and sum of a long line.
template <typename S>
struct Statistics {
  S maximum = minus_infinity<S>();
  S sum = S(0);
};

// |scale|, in the exponent of the function at hand; x is negated for a scale below 0.
template <typename S>
struct Scale {
  S exponent;
  // The maximum is taken off before the scale is multiplied: the difference is exact where it
  // matters, so that parts of a line fit together however large its logits are.
  __device__ __forceinline__ S exponential(S x, S maximum) const {
    const S power = (x - maximum) * exponent;
    if constexpr (std::is_same_v<S, float>) {
      return ptx::ex2_approx(power);
    } else {
      return exp(power);
    }
  }
  // `sum` of exponentials below `maximum`, now below `new_maximum`, which must be finite.
  __device__ __forceinline__ S rescaled(S sum, S maximum, S new_maximum) const {
    return maximum == minus_infinity<S>() ? sum : sum * exponential(maximum, new_maximum);
  }
};

// The elements that belong to no matrix that fits.
template <typename Element>
__device__ __forceinline__ void store_zeros(Element* global, int64_t count, int thread,
                                            int threads) {
  for (int64_t i = thread; i < count; i += threads) global[i] = from_sum<Element>(0);
}

// The tiles of all elements: a matrix is a segment of them.
__device__ __forceinline__ OffsetsView elements_of(const MatricesView& matrices) {
  return {matrices.offsets, matrices.rows.num_seqs, matrices.capacity, true};
}

// The operands of one pass, forward or backward.
template <typename Params>
struct Operands {
  static constexpr bool kBackward = std::is_same_v<Params, Jagged2SoftmaxBackwardParams>;

  static __host__ __device__ __forceinline__ const void* x(const Params& params) {
    if constexpr (kBackward) {
      return params.out;
    } else {
      return params.a;
    }
  }
  static __host__ __device__ __forceinline__ const void* grad(const Params& params) {
    if constexpr (kBackward) {
      return params.grad_out;
    } else {
      return nullptr;
    }
  }
  static __host__ __device__ __forceinline__ void* result(const Params& params) {
    if constexpr (kBackward) {
      return params.grad_a;
    } else {
      return params.out;
    }
  }
};

}  // namespace jagged_cuda::softmax
