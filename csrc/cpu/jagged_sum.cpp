// jagged_sum on the CPU (reduce_rows.h).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include "cpu/reduce_rows.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_sum(Tensor x, Tensor offsets) {
  constexpr const char* op = "jagged_sum";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets});
  return reduce_rows(op, x, offsets, sizes, /*mean=*/false);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_sum", TORCH_BOX(&jagged_cuda::cpu::jagged_sum));
}
