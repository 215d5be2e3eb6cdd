// The dtype of a tensor, as kernels of rows take it.
#pragma once

#include "contract/contract.h"

#include "cuda/kernels/rows/row_type.h"

namespace jagged_cuda {

// Of the dtypes that a contract allows as "any".
inline RowType row_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return RowType::kBf16;
    case ScalarType::Half:
      return RowType::kF16;
    case ScalarType::Double:
      return RowType::kF64;
    case ScalarType::Char:
      return RowType::kI8;
    case ScalarType::Byte:
      return RowType::kU8;
    case ScalarType::Short:
      return RowType::kI16;
    case ScalarType::Int:
      return RowType::kI32;
    case ScalarType::Long:
      return RowType::kI64;
    case ScalarType::Bool:
      return RowType::kBool;
    default:
      return RowType::kF32;
  }
}

}  // namespace jagged_cuda
