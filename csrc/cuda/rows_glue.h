// What the glue of conversions and reductions shares.
#pragma once

#include "cuda/glue.h"
#include "contract/rows.h"

#include "cuda/kernels/prim/element_type.h"

#include <initializer_list>

namespace jagged_cuda {

inline ElementType element_type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return ElementType::kBf16;
    case ScalarType::Half:
      return ElementType::kFp16;
    case ScalarType::Double:
      return ElementType::kFp64;
    default:
      return ElementType::kFp32;
  }
}

// The widest unit, up to 16 bytes, in which rows of `columns` elements of x can be copied, where
// `dims` are the dimensions that lead from one row to another. Results are contiguous and aligned.
inline int copy_unit_bytes(const Tensor& x, int64_t columns, std::initializer_list<int64_t> dims) {
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());
  const auto fits = [&](int64_t unit) {
    bool multiple = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % unit == 0 &&
                    columns * elem_bytes % unit == 0;
    for (int64_t dim : dims) {
      multiple = multiple && (x.size(dim) <= 1 || x.stride(dim) * elem_bytes % unit == 0);
    }
    return multiple;
  };
  int unit = 16;
  while (unit > elem_bytes && !fits(unit)) unit /= 2;
  return unit;
}

}  // namespace jagged_cuda
