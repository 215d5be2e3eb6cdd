#include "cuda/glue.h"
#include "contract/rows.h"
#include "cuda/kernels/jagged_take.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// x [T, ...], index [N] -> [N, ...]
Tensor jagged_take(const Tensor& x, const Tensor& index, bool unique,
                   const std::optional<Tensor>& chosen, const std::optional<Tensor>& source,
                   const std::optional<Tensor>& taken) {
  constexpr const char* op = "jagged_take";
  static const Contract contract(op);
  const Sizes sizes = contract.check({x, index, unique, chosen, source, taken});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor out = allocate(op, x, with_rows_of(x, 1, {sizes.N}));
  if (sizes.N == 0 || sizes.rest == 0) return out;
  const Tensor numbers = as_contiguous(op, index), rows = as_contiguous(op, x, 1);
  const int64_t elem_bytes = static_cast<int64_t>(x.element_size());

  JaggedTakeParams params;
  params.unit_bytes = copy_unit_bytes(rows, {0});
  params.x = rows.const_data_ptr();
  params.total = sizes.T;
  params.stride = rows.stride(0) * elem_bytes / params.unit_bytes;
  params.index = numbers.const_data_ptr<int64_t>();
  params.out = out.mutable_data_ptr();
  params.rows = sizes.N;
  params.row_units = sizes.rest * elem_bytes / params.unit_bytes;
  check_cuda(op, launch_jagged_take(params, current_stream(x)));
  return out;
}

// index [N] -> [total]: which row of the result each row went to, -1 for none
Tensor jagged_take_backward(const Tensor& index, int64_t total) {
  constexpr const char* op = "jagged_take_backward";
  static const Contract contract(op);
  const Sizes sizes = contract.check({index, total});
  const torch::stable::accelerator::DeviceGuard guard(index.get_device_index());
  const Tensor inverse = allocate(op, index, {total});
  if (total == 0) return inverse;
  const Tensor numbers = as_contiguous(op, index);
  check_cuda(op, launch_jagged_take_backward({numbers.const_data_ptr<int64_t>(),
                                              inverse.mutable_data_ptr<int64_t>(), sizes.N, total},
                                             current_stream(index)));
  return inverse;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_take", TORCH_BOX(&jagged_take));
  m.impl("jagged_take_backward", TORCH_BOX(&jagged_take_backward));
}

}  // namespace
}  // namespace jagged_cuda
