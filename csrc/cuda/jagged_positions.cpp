#include "cuda/glue.h"
#include "cuda/kernels/jagged_positions.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], targets [B] -> [total]
Tensor jagged_positions(const Tensor& offsets, const std::optional<Tensor>& targets, int64_t total,
                        bool from_end, int64_t same_targets) {
  constexpr const char* op = "jagged_positions";
  static const Contract contract(op);
  contract.check({offsets, targets, total, from_end, same_targets});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, total);
  const std::optional<Tensor> counts = checked_counts(op, "targets", targets);
  const Tensor out = allocate(op, offsets, {total}, ScalarType::Int);
  if (total == 0) return out;

  JaggedPositionsParams params;
  params.out = static_cast<int32_t*>(out.mutable_data_ptr());
  params.offsets = view_offsets(bounds, total);
  params.targets = view_counts(counts, same_targets);
  params.from_end = from_end;
  check_cuda(op, launch_jagged_positions(params, current_stream(offsets)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_positions", TORCH_BOX(&jagged_positions));
}

}  // namespace
}  // namespace jagged_cuda
