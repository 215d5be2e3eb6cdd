#include "cuda/ranges_glue.h"
#include "cuda/kernels/jagged_index_select.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], index [N] -> [total], [N + 1]
Plan jagged_index_select(const Tensor& offsets, const Tensor& index, int64_t rows, int64_t total,
                         int64_t function) {
  constexpr const char* op = "jagged_index_select";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, index, rows, total, function});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets), chosen = as_contiguous(op, index);
  const char* asked = kIndexSelectFunctions[function];
  maybe_validate_offsets(asked, "offsets", bounds, rows);
  maybe_validate_index(asked, "index", chosen, sizes.B);
  return plan_ranges(
      op, asked, bounds, rows, sizes.N, total,
      [&](RangesParams& params) { params.chosen = chosen.const_data_ptr<int64_t>(); },
      launch_jagged_index_select);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_index_select", TORCH_BOX(&jagged_index_select));
}

}  // namespace
}  // namespace jagged_cuda
