// The bodies of contract.h and checks.h, compiled once into each library.

#include "contract/checks.h"
#include "contract/contract.h"

namespace jagged_cuda {

void fail(const std::string& text) { throw std::runtime_error(text); }

void fail_argument(const std::string& op, const std::string& argument, const std::string& expected,
                   const std::string& actual) {
  fail(op + ": " + argument + " must be " + expected + ", got " + actual);
}

std::string dtype_name(ScalarType dtype) {
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

std::string shape_text(Shape sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string shape_text(const Tensor& tensor) { return shape_text(tensor.sizes()); }

std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

// Inside the stable ABI a failed allocation loses its type and text, so it is thrown with a marker
// that jagged_cuda/ops/_dispatch.py turns into torch.OutOfMemoryError.
[[noreturn]] static void fail_allocation(const char* op, const Tensor& like,
                                         const std::string& shape, ScalarType dtype) {
  fail(std::string(op) + ": out of memory on " + device_text(like) + " allocating a tensor of " +
       shape + " " + dtype_name(dtype));
}

// new_empty would take 0.7 us more of the host's time, to find its operator by name.
Tensor allocate(const char* op, const Tensor& like, Shape sizes, ScalarType dtype) {
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

Tensor allocate(const char* op, const Tensor& like, Shape sizes) {
  return allocate(op, like, sizes, like.scalar_type());
}

Tensor contiguous_copy(const char* op, const Tensor& tensor) {
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    fail_allocation(op, tensor, shape_text(tensor), tensor.scalar_type());
  }
}

Tensor as_contiguous(const char* op, const Tensor& tensor, int64_t first) {
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

std::string finding_text(const char* op, const char* argument, const Finding& finding) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  const bool of_matrices =
      finding.fault == Fault::kMatrixBegin || finding.fault == Fault::kMatrixSum;
  const auto name = [&](int64_t index) {
    return (of_matrices ? "matrix_offsets" : std::string(argument)) + "[" + number(index) + "]";
  };
  const std::string got = ", got " + number(finding.value);
  const std::string must_be = std::string(op) + ": " + name(finding.index) + " must be ";
  switch (finding.fault) {
    case Fault::kNegative:
    case Fault::kMatrixBegin:
      return must_be + ">= 0" + got;
    case Fault::kDecreasing:
      return must_be + ">= " + name(finding.index - 1) + " = " + number(finding.reference) + got;
    case Fault::kPastTheEnd:
      return must_be + "<= the number of rows " + number(finding.reference) + got;
    case Fault::kTooLong:
      return std::string(op) + ": sequence " + number(finding.index) + " of " + argument +
             " must have at most max_len = " + number(finding.reference) + " rows" + got;
    case Fault::kCapacity:
      return std::string(op) + ": " + argument + " must be at least " + number(finding.reference) +
             got;
    case Fault::kOutOfRange:
      return must_be + "the number of one of " + number(finding.reference) + " sequences" + got;
    case Fault::kMatrixSum:
      return must_be + name(finding.index - 1) + " + " + number(finding.rows) + " * " +
             number(finding.columns) + " = " + number(finding.reference) + got;
    case Fault::kMatrixCapacity:
      return std::string(op) + ": " + argument + " must be at least " + number(finding.reference) +
             " elements (the matrix of sequence " + number(finding.index) + " ends there)" + got;
    case Fault::kNone:
      break;
  }
  return "";
}

}  // namespace jagged_cuda
