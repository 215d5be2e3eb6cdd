// What every operator asks of its arguments, and the one sentence it answers with. The texts are
// the same on the CPU, on CUDA and in the fake kernels (jagged_cuda/ops/_contract.py), which a test
// compares.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace jagged_cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A std::runtime_error reaches Python as RuntimeError with its text alone; STD_TORCH_CHECK would
// put file and line first.
[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

// "op: argument must be <expected>, got <actual>"
[[noreturn]] inline void fail_argument(const char* op, const char* argument,
                                       const std::string& expected, const std::string& actual) {
  fail(std::string(op) + ": " + argument + " must be " + expected + ", got " + actual);
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "an unsupported dtype";
  }
}

inline std::string shape_text(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
  }
  return text + "]";
}

inline std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && (a.is_cpu() || a.get_device_index() == b.get_device_index());
}

// `expected` names the shape in the project's letters, for example "[T, D]".
inline void check_dim(const char* op, const char* argument, const Tensor& tensor, int64_t dim,
                      const char* expected) {
  if (tensor.dim() != dim) fail_argument(op, argument, expected, shape_text(tensor));
}

inline void check_shape(const char* op, const char* argument, const Tensor& tensor,
                        std::initializer_list<int64_t> expected) {
  bool same = tensor.dim() == static_cast<int64_t>(expected.size());
  int64_t dim = 0;
  for (int64_t size : expected) same = same && tensor.size(dim++) == size;
  if (!same) fail_argument(op, argument, shape_text(expected), shape_text(tensor));
}

inline void check_floating(const char* op, const char* argument, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::Double && dtype != ScalarType::Half &&
      dtype != ScalarType::BFloat16) {
    fail_argument(op, argument, "float32, float64, float16 or bfloat16", dtype_name(dtype));
  }
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor,
                        ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    fail_argument(op, argument, dtype_name(expected), dtype_name(tensor.scalar_type()));
  }
}

inline void check_device(const char* op, const char* argument, const Tensor& tensor,
                         const Tensor& reference) {
  if (!same_device(tensor, reference)) {
    fail_argument(op, argument, "on " + device_text(reference), "on " + device_text(tensor));
  }
}

// Of the dtype and on the device of `reference`.
inline void check_like(const char* op, const char* argument, const Tensor& tensor,
                       const Tensor& reference) {
  check_dtype(op, argument, tensor, reference.scalar_type());
  check_device(op, argument, tensor, reference);
}

inline void check_offsets(const char* op, const char* argument, const Tensor& offsets,
                          const Tensor& reference) {
  if (offsets.dim() != 1 || offsets.size(0) < 1) {
    fail_argument(op, argument, "[B + 1]", shape_text(offsets));
  }
  if (offsets.scalar_type() != ScalarType::Int && offsets.scalar_type() != ScalarType::Long) {
    fail_argument(op, argument, "int32 or int64", dtype_name(offsets.scalar_type()));
  }
  check_device(op, argument, offsets, reference);
}

// Inside the stable ABI a failed allocation loses its type and text, so it is thrown with a marker
// that jagged_cuda/ops/_memory.py turns into torch.OutOfMemoryError.
[[noreturn]] inline void fail_allocation(const char* op, const Tensor& like,
                                         const std::string& shape, ScalarType dtype) {
  fail(std::string(op) + ": out of memory on " + device_text(like) + " allocating a tensor of " +
       shape + " " + dtype_name(dtype));
}

// An uninitialised tensor on the device of `like`.
inline Tensor allocate(const char* op, const Tensor& like, std::initializer_list<int64_t> sizes,
                       ScalarType dtype) {
  try {
    return torch::stable::new_empty(
        like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype);
  } catch (const std::exception&) {
    fail_allocation(op, like, shape_text(sizes), dtype);
  }
}

inline Tensor allocate(const char* op, const Tensor& like, std::initializer_list<int64_t> sizes) {
  return allocate(op, like, sizes, like.scalar_type());
}

inline Tensor contiguous_copy(const char* op, const Tensor& tensor) {
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    fail_allocation(op, tensor, shape_text(tensor), tensor.scalar_type());
  }
}

// The last dimension contiguous: the form in which kernels take their operands, with any stride
// between rows. Anything else (transposed, expanded along its last dimension) goes through this one
// copy.
inline Tensor rows_contiguous(const char* op, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  const bool native = last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1;
  return native ? tensor : contiguous_copy(op, tensor);
}

inline Tensor as_contiguous(const char* op, const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : contiguous_copy(op, tensor);
}

}  // namespace jagged_cuda
