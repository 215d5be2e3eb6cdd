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
template <Activation kActivation, typename S>
__device__ __forceinline__ S activate(S x) {
  if constexpr (kActivation == Activation::kRelu) {
    return x < S(0) ? S(0) : x;
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * S(0.5) * (S(1) + erf(x * S(0.7071067811865476)));
  } else if constexpr (kActivation == Activation::kSilu) {
    return x * sigmoid(x);
  } else if constexpr (kActivation == Activation::kSigmoid) {
    return sigmoid(x);
  } else if constexpr (kActivation == Activation::kTanh) {
    return hyperbolic_tangent(x);
  } else {
    return x;
  }
}

// Several numbers: one branch for all of them, behind which they do not wait for each other.
template <typename S, int kCount>
__device__ __forceinline__ void activate(S (&x)[kCount], Activation activation) {
  const auto with = [&](auto apply) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = apply(x[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return with([](S x) { return activate<Activation::kRelu>(x); });
    case Activation::kGelu:
      return with([](S x) { return activate<Activation::kGelu>(x); });
    case Activation::kSilu:
      return with([](S x) { return activate<Activation::kSilu>(x); });
    case Activation::kSigmoid:
      return with([](S x) { return activate<Activation::kSigmoid>(x); });
    case Activation::kTanh:
      return with([](S x) { return activate<Activation::kTanh>(x); });
  }
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
// `first` on, of which `columns` exist. The loop over blocks of columns stays one, at the first place of
// registers that move on: unrolled, with all activations for every sum, it was half of the kernel.
template <typename Config>
__device__ __forceinline__ void apply_epilogue(Accumulator<Config>& rAcc,
                                               const Epilogue<typename Config::Element>& epilogue,
                                               int64_t first, int column, int columns) {
  const int quad = threadIdx.x % 4;
  rAcc.finish();
#pragma unroll 1
  for (int j = 0; j < Config::kFragmentsN; ++j) {
    float bias[2] = {}, sums[Config::kFragmentsM * 4];
#pragma unroll
    for (int c = 0; epilogue.bias != nullptr && c < 2; ++c) {
      const int elem = column + 8 * j + 2 * quad + c;
      if (elem < columns) bias[c] = to_sum(epilogue.bias[first + elem]);
    }
#pragma unroll
    for (int n = 0; n < Config::kFragmentsM * 4; ++n) {
      sums[n] = rAcc.total[n / 4][0][n % 4] + bias[n % 2];
    }
    activate(sums, epilogue.activation);
#pragma unroll
    for (int n = 0; n < Config::kFragmentsM * 4; ++n) rAcc.total[n / 4][0][n % 4] = sums[n];
    rAcc.rotate();
  }
}

}  // namespace jagged_cuda::gemm
