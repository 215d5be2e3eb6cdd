// jagged_dense_add on the CPU (dense_rows.h: items). Integers wrap around, as torch's do; of bools
// one that is true makes the sum true.
#include <torch/csrc/stable/library.h>

#include "cpu/dense_rows.h"

namespace jagged_cuda::cpu {
namespace {

template <class Bits>
void add_bits(const void* x, const void* y, void* out, int64_t count) {
  const Bits *a = static_cast<const Bits*>(x), *b = static_cast<const Bits*>(y);
  Bits* sum = static_cast<Bits*>(out);
  for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<Bits>(a[i] + b[i]);
}

void add_bools(const void* x, const void* y, void* out, int64_t count) {
  const uint8_t *a = static_cast<const uint8_t*>(x), *b = static_cast<const uint8_t*>(y);
  uint8_t* sum = static_cast<uint8_t*>(out);
  for (int64_t i = 0; i < count; ++i) sum[i] = a[i] | b[i];
}

Tensor jagged_dense_add(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_add";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  const auto run = [&](const auto& combine) {
    return combine_with_dense(op, x, y, offsets, sizes, true, combine);
  };
  switch (x.scalar_type()) {
    case ScalarType::Bool:
      return run(add_bools);
    case ScalarType::Char:
    case ScalarType::Byte:
      return run(add_bits<uint8_t>);
    case ScalarType::Short:
      return run(add_bits<uint16_t>);
    case ScalarType::Int:
      return run(add_bits<uint32_t>);
    case ScalarType::Long:
      return run(add_bits<uint64_t>);
    default:
      return run(combine_floats(x, Combine::kAdd));
  }
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_dense_add", TORCH_BOX(&jagged_cuda::cpu::jagged_dense_add));
}
