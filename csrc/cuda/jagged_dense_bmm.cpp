#include "cuda/products_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// x [T, D], y [B, D, N], offsets [B + 1], bias [B, N] or none -> [T, N]
Tensor jagged_dense_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32,
                        const std::optional<Tensor>& bias, int64_t activation) {
  constexpr const char* op = "jagged_dense_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32, bias, activation});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  return times_dense(op, x, y, false, bounds, allow_tf32, current_stream(x), bias,
                     static_cast<Activation>(activation));
}

// grad_out [T, N], x [T, D], y [B, D, N] -> like x, like y
std::tuple<Tensor, Tensor> jagged_dense_bmm_backward(const Tensor& grad_out, const Tensor& x,
                                                     const Tensor& y, const Tensor& offsets,
                                                     bool allow_tf32) {
  constexpr const char* op = "jagged_dense_bmm_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const cudaStream_t stream = current_stream(x);
  const Tensor grad = as_contiguous(op, grad_out, -1), rows = as_contiguous(op, x, -1),
               dense = shared_dense(op, y);
  // The product that writes most comes last: what it leaves in L2 would else be written back while
  // the other one reads.
  std::optional<Tensor> partial;
  const Tensor grad_y = times_jagged(op, rows, grad, bounds, allow_tf32, stream, partial);
  const Tensor grad_x = times_dense(op, grad, dense, true, bounds, allow_tf32, stream, std::nullopt,
                                    Activation{}, grad_y.numel() > 0);
  return {grad_x, grad_y};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_dense_bmm", TORCH_BOX(&jagged_dense_bmm));
  m.impl("jagged_dense_bmm_backward", TORCH_BOX(&jagged_dense_bmm_backward));
}

}  // namespace
}  // namespace jagged_cuda
