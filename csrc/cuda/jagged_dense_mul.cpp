#include "cuda/combine_glue.h"
#include "cuda/kernels/jagged_dense_mul.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], y [B, M, ...], offsets [B + 1] -> [T, ...]
Tensor jagged_dense_mul(const Tensor& x, const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_mul";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets});
  return combine_with_dense(op, x, y, offsets, sizes, [&](const auto& params, auto stream) {
    return launch_jagged_dense_mul(params, element_type(x.scalar_type()), stream);
  });
}

// grad_out, x [T, ...], y [B, M, ...], offsets [B + 1] -> [T, ...], [B, M, ...]
std::tuple<Tensor, Tensor> jagged_dense_mul_backward(const Tensor& grad_out, const Tensor& x,
                                                     const Tensor& y, const Tensor& offsets) {
  constexpr const char* op = "jagged_dense_mul_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets});
  return combine_backward(op, grad_out, x, y, offsets, sizes.M, sizes,
                          launch_jagged_dense_mul_backward);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_mul", TORCH_BOX(&jagged_dense_mul));
  m.impl("jagged_dense_mul_backward", TORCH_BOX(&jagged_dense_mul_backward));
}

}  // namespace
}  // namespace jagged_cuda
