#include "cuda/combine_glue.h"
#include "cuda/kernels/jagged_dense_add.h"
#include "cuda/row_type.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], y [B, M, ...], offsets [B + 1] -> [T, ...]
Tensor jagged_dense_add(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_add";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  return combine_with_dense(op, x, y, offsets, sizes, [&](const auto& params, auto stream) {
    return launch_jagged_dense_add(params, row_type(x.scalar_type()), stream);
  });
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_add", TORCH_BOX(&jagged_dense_add));
}

}  // namespace
}  // namespace jagged_cuda
