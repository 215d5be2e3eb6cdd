#include "cuda/rows_glue.h"
#include "cuda/kernels/jagged_softmax.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// Whether rows of `columns` elements, `stride` apart, can be read and written as vectors of 4
// elements (2 of fp64).
bool has_vectors(const Tensor& tensor, int64_t columns, int64_t stride) {
  const int64_t count = tensor.scalar_type() == ScalarType::Double ? 2 : 4;
  const int64_t bytes = count * static_cast<int64_t>(tensor.element_size());
  return columns % count == 0 && stride % count == 0 &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

const char* kernel_name(ElementType type, bool backward) {
  switch (type) {
    case ElementType::kFp32:
      return backward ? "cuda.jagged_softmax_backward.fp32" : "cuda.jagged_softmax.fp32";
    case ElementType::kFp64:
      return backward ? "cuda.jagged_softmax_backward.fp64" : "cuda.jagged_softmax.fp64";
    case ElementType::kFp16:
      return backward ? "cuda.jagged_softmax_backward.fp16" : "cuda.jagged_softmax.fp16";
    case ElementType::kBf16:
      return backward ? "cuda.jagged_softmax_backward.bf16" : "cuda.jagged_softmax.bf16";
  }
  return "none";
}

// x [T, ...], offsets [B + 1] -> like x
Tensor jagged_softmax(const Tensor& x, const Tensor& offsets, double scale) {
  constexpr const char* op = "jagged_softmax";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, offsets, scale});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor out = allocate(op, x, x.sizes());
  if (sizes.T == 0 || sizes.rest == 0) return out;
  const Tensor rows = as_contiguous(op, x, 1);

  JaggedSoftmaxParams params;
  params.x = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.x_stride = rows.stride(0);
  params.scale = scale;
  params.vectors = has_vectors(rows, sizes.rest, params.x_stride);
  params.type = element_type_of(x);
  check_cuda(op, launch_jagged_softmax(params, current_stream(x)));
  record_kernel(kernel_name(params.type, false));
  return out;
}

// grad_out and out [T, ...], offsets [B + 1] -> grad_x, like out
Tensor jagged_softmax_backward(const Tensor& grad_out, const Tensor& out, const Tensor& offsets,
                               double scale) {
  constexpr const char* op = "jagged_softmax_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({grad_out, out, offsets, scale});
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor grad_x = allocate(op, out, out.sizes());
  if (sizes.T == 0 || sizes.rest == 0) return grad_x;
  const Tensor grad_rows = as_contiguous(op, grad_out, 1), out_rows = as_contiguous(op, out, 1);

  JaggedSoftmaxBackwardParams params;
  params.grad_out = grad_rows.const_data_ptr();
  params.out = out_rows.const_data_ptr();
  params.grad_x = grad_x.mutable_data_ptr();
  params.offsets = view_offsets(bounds, sizes.T);
  params.columns = sizes.rest;
  params.grad_out_stride = grad_rows.stride(0);
  params.out_stride = out_rows.stride(0);
  params.scale = scale;
  params.vectors = has_vectors(grad_rows, sizes.rest, params.grad_out_stride) &&
                   has_vectors(out_rows, sizes.rest, params.out_stride);
  params.type = element_type_of(out);
  check_cuda(op, launch_jagged_softmax_backward(params, current_stream(out)));
  record_kernel(kernel_name(params.type, true));
  return grad_x;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_softmax", TORCH_BOX(&jagged_softmax));
  m.impl("jagged_softmax_backward", TORCH_BOX(&jagged_softmax_backward));
}

}  // namespace
}  // namespace jagged_cuda
