// What every kernel needs between arguments and results: the form of its error messages, its
// contract (shapes.h), the check of offsets, allocation, and operands in place or copied.
#pragma once

#include "contract/shapes.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace jagged_cuda {

using torch::headeronly::ScalarType;

// A std::runtime_error reaches Python as RuntimeError with its text alone; STD_TORCH_CHECK would
// put file and line first.
[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

// "op: argument must be <expected>, got <actual>"
[[noreturn]] inline void fail_argument(const std::string& op, const std::string& argument,
                                       const std::string& expected, const std::string& actual) {
  fail(op + ": " + argument + " must be " + expected + ", got " + actual);
}

inline std::string dtype_name(ScalarType dtype) {
  constexpr std::pair<ScalarType, const char*> names[] = {
      {ScalarType::Float, "float32"},
      {ScalarType::Double, "float64"},
      {ScalarType::Half, "float16"},
      {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"},
      {ScalarType::Short, "int16"},
      {ScalarType::Char, "int8"},
      {ScalarType::Byte, "uint8"},
      {ScalarType::Bool, "bool"},
      {ScalarType::ComplexFloat, "complex64"},
      {ScalarType::ComplexDouble, "complex128"}};
  for (const auto& [known, name] : names) {
    if (known == dtype) return name;
  }
  return "an unsupported dtype";
}

using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::string shape_text(Shape sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline std::string shape_text(const Tensor& tensor) { return shape_text(tensor.sizes()); }

inline std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

// The dtype of sums inside the kernels, and of LSE.
inline ScalarType sum_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Inside the stable ABI a failed allocation loses its type and text, so it is thrown with a marker
// that jagged_cuda/ops/_dispatch.py turns into torch.OutOfMemoryError.
[[noreturn]] inline void fail_allocation(const char* op, const Tensor& like,
                                         const std::string& shape, ScalarType dtype) {
  fail(std::string(op) + ": out of memory on " + device_text(like) + " allocating a tensor of " +
       shape + " " + dtype_name(dtype));
}

// An uninitialised, contiguous tensor on the device of `like`. new_empty would take 0.7 us more of
// the host's time, to find its operator by name.
inline Tensor allocate(const char* op, const Tensor& like, Shape sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t elems = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = elems;
    elems *= std::max<int64_t>(sizes[dim], 1);
  }
  int32_t device_type = 0;
  AtenTensorHandle tensor = nullptr;
  if (aoti_torch_get_device_type(like.get(), &device_type) != 0 ||
      aoti_torch_empty_strided(
          static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
          torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
          like.get_device_index(), &tensor) != 0) {
    fail_allocation(op, like, shape_text(sizes), dtype);
  }
  return Tensor(tensor);
}

inline Tensor allocate(const char* op, const Tensor& like, Shape sizes) {
  return allocate(op, like, sizes, like.scalar_type());
}

inline Tensor contiguous_copy(const char* op, const Tensor& tensor) {
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    fail_allocation(op, tensor, shape_text(tensor), tensor.scalar_type());
  }
}

// The form in which kernels take their operands: the dimensions from `first` on contiguous, any
// strides between the others. Anything else (transposed, expanded) goes through this one copy.
// Negative: counted from the end.
inline Tensor as_contiguous(const char* op, const Tensor& tensor, int64_t first = 0) {
  const int64_t dims = tensor.dim(), begin = std::max<int64_t>(0, first < 0 ? dims + first : first);
  int64_t elems = 1;
  bool native = true;
  for (int64_t dim = dims - 1; native && dim >= begin; --dim) {
    const int64_t size = tensor.size(dim);
    native = size <= 1 || tensor.stride(dim) == elems;
    elems *= size;
  }
  return native ? tensor : contiguous_copy(op, tensor);
}

}  // namespace jagged_cuda
