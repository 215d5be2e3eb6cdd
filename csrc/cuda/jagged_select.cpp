#include "cuda/plan.h"
#include "cuda/kernels/jagged_select.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], keep [T] -> [total], [B + 1]
Plan jagged_select(const Tensor& offsets, const Tensor& keep, int64_t total) {
  constexpr const char* op = "jagged_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, keep, total});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), mask = as_contiguous(op, keep);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const PlanTensors plan(op, bounds, total, sizes.B);
  const Tensor counts = allocate(op, bounds, {select_tiles(sizes.T)}, ScalarType::Int);

  JaggedSelectParams params;
  params.offsets = view_offsets(bounds, sizes.T);
  params.keep = static_cast<const uint8_t*>(mask.const_data_ptr());
  params.counts = counts.mutable_data_ptr<int>();
  params.index = plan.index.mutable_data_ptr<int64_t>();
  params.planned = plan.offsets.mutable_data_ptr();
  params.uncut = plan.uncut_data();
  params.total = total;
  params.capacity = plan.capacity;
  check_cuda(op, launch_jagged_select(params, current_stream(offsets)));
  plan.maybe_validate(op);
  return {plan.index, plan.offsets};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_select", TORCH_BOX(&jagged_select));
}

}  // namespace
}  // namespace jagged_cuda
