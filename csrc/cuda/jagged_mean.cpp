#include "cuda/sum_glue.h"
#include "cuda/kernels/jagged_mean.h"
#include "contract/jagged_mean.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], offsets [B + 1] -> [B, ...]
Tensor jagged_mean(const Tensor& x, const Tensor& offsets) {
  const JaggedMeanSizes sizes = parse_jagged_mean(x, offsets);
  return reduce_rows("jagged_mean", x, offsets, sizes, launch_jagged_mean);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) { m.impl("jagged_mean", TORCH_BOX(&jagged_mean)); }

}  // namespace
}  // namespace jagged_cuda
