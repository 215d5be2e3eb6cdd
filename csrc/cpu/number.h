// The elements of a tensor of any dtype, as values of C++.
#pragma once

#include "contract/contract.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

namespace jagged_cuda::cpu {

// read(pointer) with a pointer to the elements; of bools, to bytes of 0 or 1.
template <class Read>
decltype(auto) with_elements(const Tensor& tensor, const Read& read) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return read(static_cast<const double*>(data));
    case ScalarType::Half:
      return read(static_cast<const torch::headeronly::Half*>(data));
    case ScalarType::BFloat16:
      return read(static_cast<const torch::headeronly::BFloat16*>(data));
    case ScalarType::Char:
      return read(static_cast<const int8_t*>(data));
    case ScalarType::Short:
      return read(static_cast<const int16_t*>(data));
    case ScalarType::Int:
      return read(static_cast<const int32_t*>(data));
    case ScalarType::Long:
      return read(static_cast<const int64_t*>(data));
    case ScalarType::Byte:
    case ScalarType::Bool:
      return read(static_cast<const uint8_t*>(data));
    default:
      return read(static_cast<const float*>(data));
  }
}

}  // namespace jagged_cuda::cpu
