// What may follow a product before it is stored: a bias for each column, and an activation.
#pragma once

#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "contract/activation.h"

namespace jagged_cuda::gemm {

// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

__device__ __forceinline__ float hyperbolic_tangent(float x) {
  // Near 0 the quotient of exponentials loses its digits: x - x^3 / 3 is exact there.
  const float quotient = 2.0f * sigmoid(2.0f * x) - 1.0f;
  return fabsf(x) < 0.03f ? fmaf(x * x * x, -1.0f / 3.0f, x) : quotient;
}
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

// As in torch, a NaN stays one; gelu is the one of the error function.
template <typename S>
__device__ __forceinline__ S activate(S x, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < S(0) ? S(0) : x;
    case Activation::kGelu:
      return x * S(0.5) * (S(1) + erf(x * S(0.7071067811865476)));
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kSigmoid:
      return sigmoid(x);
    case Activation::kTanh:
      return hyperbolic_tangent(x);
  }
  return x;
}

// For the rows of one sequence.
template <typename Element>
struct Epilogue {
  const Element* bias;  // [N] or null
  Activation activation;

  __device__ __forceinline__ bool exists() const {
    return bias != nullptr || activation != Activation::kNone;
  }
};

// Applies it to a warp's part of a tile of C, whose corner is at `column` of the columns from
// `first` on, of which `columns` exist.
template <typename Config>
__device__ __forceinline__ void apply_epilogue(Accumulator<Config>& rAcc,
                                               const Epilogue<typename Config::Element>& epilogue,
                                               int64_t first, int column, int columns) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < Config::kFragmentsN; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int elem = column + 8 * j + 2 * quad + c;
      float bias = 0.0f;
      if (epilogue.bias != nullptr && elem < columns) bias = to_sum(epilogue.bias[first + elem]);
#pragma unroll
      for (int i = 0; i < Config::kFragmentsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rAcc.set(i, j, 2 * half + c,
                   activate(rAcc.value(i, j, 2 * half + c) + bias, epilogue.activation));
        }
      }
    }
  }
}

}  // namespace jagged_cuda::gemm
