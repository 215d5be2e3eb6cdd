// What the glue of the products shares.
#pragma once

#include "contract/contract.h"

#include "cuda/kernels/gemm/math.h"

#include <algorithm>
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

// Whether each line of `tensor` is aligned to 16 bytes and has a multiple of them, where `dims` are
// the dimensions that lead from one line to another.
inline bool has_aligned_lines(const Tensor& tensor, std::initializer_list<int64_t> dims) {
  constexpr int64_t kBytes = 16;
  const int64_t element_bytes = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t size = tensor.size(dim);
    const bool leads = std::find(dims.begin(), dims.end(), dim) != dims.end();
    const int64_t elements = leads ? (size > 1 ? tensor.stride(dim) : 0) : size;
    aligned = aligned && elements * element_bytes % kBytes == 0;
  }
  return aligned;
}

}  // namespace jagged_cuda
