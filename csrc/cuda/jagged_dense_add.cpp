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

// grad_out [T, ...], offsets [B + 1] -> [T, ...], [B, max_len, ...]
std::tuple<Tensor, Tensor> jagged_dense_add_backward(const Tensor& grad_out, const Tensor& offsets,
                                                     int64_t max_len) {
  constexpr const char* op = "jagged_dense_add_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, offsets, max_len});
  return combine_backward(op, grad_out, std::nullopt, std::nullopt, offsets, max_len, sizes,
                          launch_jagged_dense_add_backward);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_add", TORCH_BOX(&jagged_dense_add));
  m.impl("jagged_dense_add_backward", TORCH_BOX(&jagged_dense_add_backward));
}

}  // namespace
}  // namespace jagged_cuda
