#include "cuda/sum_glue.h"
#include "cuda/kernels/jagged_mean.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], offsets [B + 1] -> [B, ...]
Tensor jagged_mean(const Tensor& x, const Tensor& offsets) {
  constexpr const char* op = "jagged_mean";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets});
  return reduce_rows(op, x, offsets, sizes, launch_jagged_mean);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) { m.impl("jagged_mean", TORCH_BOX(&jagged_mean)); }

}  // namespace
}  // namespace jagged_cuda
