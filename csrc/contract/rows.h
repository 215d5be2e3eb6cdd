// Tensors whose dimensions after the first ones only make up rows of so many elements: [T, ...] and
// [B, M, ...].
#pragma once

#include "contract/contract.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <vector>

namespace jagged_cuda {

// Elements of a row: the product of the dimensions from `first` on.
inline int64_t row_elems(const Tensor& tensor, int64_t first) {
  int64_t elems = 1;
  for (int64_t dim = first; dim < tensor.dim(); ++dim) elems *= tensor.size(dim);
  return elems;
}

// `leading`, and then the dimensions of `tensor` from `first` on.
inline std::vector<int64_t> with_rows_of(const Tensor& tensor, int64_t first,
                                         std::initializer_list<int64_t> leading) {
  std::vector<int64_t> shape = leading;
  for (int64_t dim = first; dim < tensor.dim(); ++dim) shape.push_back(tensor.size(dim));
  return shape;
}

inline std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// An uninitialised, contiguous tensor like `like`.
inline Tensor allocate_rows(const char* op, const Tensor& like, const std::vector<int64_t>& shape) {
  try {
    return torch::stable::new_empty(
        like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()));
  } catch (const std::exception&) {
    fail_allocation(op, like, shape_text(shape), like.scalar_type());
  }
}

// The form in which kernels take rows: each contiguous, with any strides between them. Anything
// else goes through one copy.
inline Tensor contiguous_rows(const char* op, const Tensor& tensor, int64_t first) {
  int64_t elems = 1;
  bool native = true;
  for (int64_t dim = tensor.dim() - 1; dim >= first; --dim) {
    native = native && (tensor.size(dim) <= 1 || tensor.stride(dim) == elems);
    elems *= tensor.size(dim);
  }
  return native ? tensor : contiguous_copy(op, tensor);
}

// Of the dtypes that operators copy: those that they compute with, and the ones of ids.
inline void check_copied(const char* op, const char* argument, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double && dtype != ScalarType::Half &&
      dtype != ScalarType::BFloat16 && dtype != ScalarType::Int && dtype != ScalarType::Long) {
    fail_argument(op, argument, "float32, float64, float16, bfloat16, int32 or int64",
                  dtype_name(dtype));
  }
}

inline void check_not_negative(const char* op, const char* argument, int64_t value) {
  if (value < 0) fail_argument(op, argument, ">= 0", std::to_string(value));
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
    default:
      take(static_cast<float>(value));
  }
  return bits;
}

}  // namespace jagged_cuda
