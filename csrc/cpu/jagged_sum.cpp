// jagged_sum on the CPU (reduce_rows.h).
#include "contract/jagged_sum.h"

#include <torch/csrc/stable/library.h>

#include "cpu/reduce_rows.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_sum(Tensor x, Tensor offsets) {
  const JaggedSumSizes sizes = parse_jagged_sum(x, offsets);
  return reduce_rows("jagged_sum", x, offsets, sizes, /*mean=*/false);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_sum", TORCH_BOX(&jagged_cuda::cpu::jagged_sum));
}
