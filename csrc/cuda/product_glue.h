// What the glue of the products shares.
#pragma once

#include "ops/contract.h"

#include "kernels/gemm/math.h"

#include <cstdint>
#include <initializer_list>

namespace jagged_cuda {

inline gemm::Math product_math(ScalarType dtype, bool allow_tf32) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return gemm::Math::kBf16;
    case ScalarType::Half:
      return gemm::Math::kFp16;
    case ScalarType::Double:
      return gemm::Math::kFp64;
    default:
      return allow_tf32 ? gemm::Math::kTf32 : gemm::Math::kFp32;
  }
}

// Whether each line of `tensor` is aligned to `bytes`, where `dims` are the dimensions that lead
// from one line to another.
inline bool has_aligned_lines(const Tensor& tensor, std::initializer_list<int64_t> dims,
                              int64_t bytes = 16) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
  for (int64_t dim : dims) {
    aligned =
        aligned && (tensor.size(dim) <= 1 ||
                    tensor.stride(dim) * static_cast<int64_t>(tensor.element_size()) % bytes == 0);
  }
  return aligned;
}

}  // namespace jagged_cuda
