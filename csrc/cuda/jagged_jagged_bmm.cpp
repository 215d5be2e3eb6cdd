#include "cuda/products_glue.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// x [T, D], y [T, N], offsets [B + 1] -> [B, D, N]
Tensor jagged_jagged_bmm(const Tensor& x, const Tensor& y, const Tensor& offsets, bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, y, offsets, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  std::optional<Tensor> partial;
  return times_jagged(op, x, y, bounds, allow_tf32, current_stream(x), partial);
}

// grad_out [B, D, N], x [T, D], y [T, N] -> like x, like y
std::tuple<Tensor, Tensor> jagged_jagged_bmm_backward(const Tensor& grad_out, const Tensor& x,
                                                      const Tensor& y, const Tensor& offsets,
                                                      bool allow_tf32) {
  constexpr const char* op = "jagged_jagged_bmm_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, x, y, offsets, allow_tf32});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const cudaStream_t stream = current_stream(x);
  const Tensor grad = shared_dense(op, grad_out), left = as_contiguous(op, x, -1),
               right = as_contiguous(op, y, -1);
  // The product that writes most comes last: what it leaves in L2 would else be written back while
  // the other one reads.
  const auto grad_x = [&](bool overlaps) {
    return times_dense(op, right, grad, true, bounds, allow_tf32, stream, std::nullopt,
                       Activation{}, overlaps);
  };
  const auto grad_y = [&](bool overlaps) {
    return times_dense(op, left, grad, false, bounds, allow_tf32, stream, std::nullopt,
                       Activation{}, overlaps);
  };
  if (x.size(1) < y.size(1)) {
    const Tensor first = grad_x(false);
    return {first, grad_y(first.numel() > 0)};
  }
  const Tensor first = grad_y(false);
  return {grad_x(first.numel() > 0), first};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_jagged_bmm", TORCH_BOX(&jagged_jagged_bmm));
  m.impl("jagged_jagged_bmm_backward", TORCH_BOX(&jagged_jagged_bmm_backward));
}

}  // namespace
}  // namespace jagged_cuda
