// Elements, vectors of them, and the type in which they are summed.
#pragma once

#include "cuda/kernels/prim/element.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace jagged_cuda {

// The one spelling of a type, in the names of kernel paths.
template <typename Element>
constexpr const char* kElementName = std::is_same_v<Element, __nv_bfloat16> ? "bf16"
                                     : std::is_same_v<Element, __half>      ? "f16"
                                     : std::is_same_v<Element, float>       ? "f32"
                                                                            : "f64";

// launch(element) with a value of the type that `type` names; kTf32 is float.
template <typename Launch>
cudaError_t with_element(ElementType type, Launch launch) {
  switch (type) {
    case ElementType::kBf16:
      return launch(__nv_bfloat16{});
    case ElementType::kF16:
      return launch(__half{});
    case ElementType::kTf32:
    case ElementType::kF32:
      return launch(float{});
    case ElementType::kF64:
      return launch(double{});
  }
  return cudaErrorInvalidValue;
}

template <typename Element>
using Sum = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <typename Element, int kVector>
struct alignas(sizeof(Element) * kVector) Vector {
  Element elems[kVector];
};

__device__ __forceinline__ float to_sum(float value) { return value; }
__device__ __forceinline__ double to_sum(double value) { return value; }
__device__ __forceinline__ float to_sum(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_sum(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Element>
__device__ __forceinline__ Element from_sum(Sum<Element> value) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// Two 16-bit elements in one register, the first in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

}  // namespace jagged_cuda
