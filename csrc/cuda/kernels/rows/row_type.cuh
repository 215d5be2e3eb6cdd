// The types behind RowType.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/rows/row_type.h"

#include <cstdint>
#include <type_traits>

namespace jagged_cuda::rows {

// An element of a bool tensor, 0 or 1.
struct Truth {
  uint8_t value;
};

// What a bool is to kernels that only compare it: they compile no code of its own for it.
template <typename Element>
using Compared = std::conditional_t<std::is_same_v<Element, Truth>, uint8_t, Element>;

// launch(element) with a value of the type that `type` names.
template <typename Launch>
cudaError_t with_row_type(RowType type, Launch launch) {
  switch (type) {
    case RowType::kBf16:
      return launch(__nv_bfloat16{});
    case RowType::kF16:
      return launch(__half{});
    case RowType::kF32:
      return launch(float{});
    case RowType::kF64:
      return launch(double{});
    case RowType::kI8:
      return launch(int8_t{});
    case RowType::kU8:
      return launch(uint8_t{});
    case RowType::kI16:
      return launch(int16_t{});
    case RowType::kI32:
      return launch(int32_t{});
    case RowType::kI64:
      return launch(int64_t{});
    case RowType::kBool:
      return launch(Truth{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace jagged_cuda::rows
