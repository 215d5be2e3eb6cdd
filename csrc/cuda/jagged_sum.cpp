#include "cuda/sum_glue.h"
#include "cuda/kernels/jagged_sum.h"
#include "contract/jagged_sum.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], offsets [B + 1] -> [B, ...]
Tensor jagged_sum(const Tensor& x, const Tensor& offsets) {
  const JaggedSumSizes sizes = parse_jagged_sum(x, offsets);
  return reduce_rows("jagged_sum", x, offsets, sizes, launch_jagged_sum);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) { m.impl("jagged_sum", TORCH_BOX(&jagged_sum)); }

}  // namespace
}  // namespace jagged_cuda
