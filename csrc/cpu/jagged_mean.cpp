// jagged_mean on the CPU (reduce_rows.h).
#include "contract/jagged_mean.h"

#include <torch/csrc/stable/library.h>

#include "cpu/reduce_rows.h"

namespace jagged_cuda::cpu {
namespace {

Tensor jagged_mean(Tensor x, Tensor offsets) {
  const JaggedMeanSizes sizes = parse_jagged_mean(x, offsets);
  return reduce_rows("jagged_mean", x, offsets, sizes, /*mean=*/true);
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_mean", TORCH_BOX(&jagged_cuda::cpu::jagged_mean));
}
