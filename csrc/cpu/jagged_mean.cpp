// jagged_mean on the CPU (reduce_rows.h).
#include "contract/contract.h"

#include <torch/csrc/stable/library.h>

#include "cpu/reduce_rows.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_mean(Tensor x, Tensor offsets) {
  constexpr const char* op = "jagged_mean";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets});
  return reduce_rows(op, x, offsets, sizes, /*mean=*/true);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_mean", TORCH_BOX(&jagged_cuda::cpu::jagged_mean));
}
