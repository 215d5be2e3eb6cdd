// What every kernel needs between arguments and results: the form of its error messages, its
// contract (shapes.h), the check of offsets, allocation, and operands in place or copied. The bodies
// are in contract.inl, compiled once into each library: in every file they took a third of its time.
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
[[noreturn]] void fail(const std::string& text);

// "op: argument must be <expected>, got <actual>"
[[noreturn]] void fail_argument(const std::string& op, const std::string& argument,
                                const std::string& expected, const std::string& actual);

std::string dtype_name(ScalarType dtype);

using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

std::string shape_text(Shape sizes);
std::string shape_text(const Tensor& tensor);
std::string device_text(const Tensor& tensor);

// The dtype of sums inside the kernels, and of LSE.
inline ScalarType sum_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// An uninitialised, contiguous tensor on the device of `like`, of its dtype unless another is given.
Tensor allocate(const char* op, const Tensor& like, Shape sizes, ScalarType dtype);
Tensor allocate(const char* op, const Tensor& like, Shape sizes);

Tensor contiguous_copy(const char* op, const Tensor& tensor);

// The form in which kernels take their operands: the dimensions from `first` on contiguous, any
// strides between the others. Anything else (transposed, expanded) goes through this one copy.
// Negative: counted from the end.
Tensor as_contiguous(const char* op, const Tensor& tensor, int64_t first = 0);

}  // namespace jagged_cuda
