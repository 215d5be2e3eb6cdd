// Tensors whose dimensions after the first ones only make up rows of so many elements: [T, ...] and
// [B, M, ...].
#pragma once

#include "contract/contract.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <vector>

namespace jagged_cuda {

// `leading`, and then the dimensions of `tensor` from `first` on.
inline std::vector<int64_t> with_rows_of(const Tensor& tensor, int64_t first,
                                         std::initializer_list<int64_t> leading) {
  std::vector<int64_t> shape = leading;
  for (int64_t dim = first; dim < tensor.dim(); ++dim) shape.push_back(tensor.size(dim));
  return shape;
}

// `value` as an element of `dtype`, in the low bytes.
inline uint64_t element_bits(ScalarType dtype, double value) {
  uint64_t bits = 0;
  const auto take = [&](auto element) { std::memcpy(&bits, &element, sizeof(element)); };
  switch (dtype) {
    case ScalarType::Double:
      take(value);
      break;
    case ScalarType::Half:
      take(torch::headeronly::Half(static_cast<float>(value)));
      break;
    case ScalarType::BFloat16:
      take(torch::headeronly::BFloat16(static_cast<float>(value)));
      break;
    case ScalarType::Int:
      take(static_cast<int32_t>(value));
      break;
    case ScalarType::Long:
      take(static_cast<int64_t>(value));
      break;
    case ScalarType::Short:
      take(static_cast<int16_t>(value));
      break;
    case ScalarType::Char:
      take(static_cast<int8_t>(value));
      break;
    case ScalarType::Byte:
      take(static_cast<uint8_t>(value));
      break;
    case ScalarType::Bool:
      take(value != 0.0);
      break;
    default:
      take(static_cast<float>(value));
  }
  return bits;
}

}  // namespace jagged_cuda
