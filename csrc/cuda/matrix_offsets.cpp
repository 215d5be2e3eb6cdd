#include "cuda/glue.h"
#include "cuda/kernels/matrix_offsets.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets [B + 1], y_offsets [B + 1] or none -> [B + 1]
Tensor matrix_offsets(const Tensor& offsets, const std::optional<Tensor>& y_offsets) {
  constexpr const char* op = "matrix_offsets";
  static const Contract contract(op);
  const Sizes sizes = contract.check({offsets, y_offsets});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor rows = as_contiguous(op, offsets);
  const Tensor columns = y_offsets ? as_contiguous(op, *y_offsets) : rows;
  const Tensor out = allocate(op, offsets, {sizes.B + 1}, ScalarType::Long);
  std::optional<Tensor> tile_sums;
  if (sizes.B > kMatrixOffsetsTile) {
    tile_sums = allocate(op, offsets, {sizes.B / kMatrixOffsetsTile}, ScalarType::Long);
  }

  MatrixOffsetsParams params;
  params.out = static_cast<int64_t*>(out.mutable_data_ptr());
  params.offsets = rows.const_data_ptr();
  params.y_offsets = columns.const_data_ptr();
  params.tile_sums = tile_sums ? static_cast<int64_t*>(tile_sums->mutable_data_ptr()) : nullptr;
  params.num_seqs = sizes.B;
  params.wide = offsets.scalar_type() == ScalarType::Long;
  check_cuda(op, launch_matrix_offsets(params, current_stream(offsets)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("matrix_offsets", TORCH_BOX(&matrix_offsets));
}

}  // namespace
}  // namespace jagged_cuda
