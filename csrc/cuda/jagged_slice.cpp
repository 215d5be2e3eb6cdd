#include "cuda/ranges_glue.h"
#include "cuda/kernels/jagged_slice.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// offsets, begin?, length? -> [total], [B + 1]
Plan jagged_slice(const Tensor& offsets, const std::optional<Tensor>& begin,
                  const std::optional<Tensor>& length, int64_t rows, int64_t total, int64_t skip,
                  std::optional<int64_t> most, bool from_end, int64_t function) {
  constexpr const char* op = "jagged_slice";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({offsets, begin, length, rows, total, skip, most, from_end, function});
  const torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  const Tensor bounds = as_contiguous(op, offsets);
  const char* asked = kSliceFunctions[function];
  maybe_validate_offsets(asked, "offsets", bounds, rows);
  const auto dense = [&](const std::optional<Tensor>& given) {
    return given ? std::optional<Tensor>(as_contiguous(op, *given)) : std::nullopt;
  };
  const std::optional<Tensor> begins = dense(begin), lengths = dense(length);
  return plan_ranges(
      op, asked, bounds, rows, sizes.B, total,
      [&](RangesParams& params) {
        params.begin = begins ? begins->const_data_ptr() : nullptr;
        params.length = lengths ? lengths->const_data_ptr() : nullptr;
        params.skip = skip;
        params.most = most.value_or(rows);
        params.from_end = from_end;
      },
      launch_jagged_slice);
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_slice", TORCH_BOX(&jagged_slice));
}

}  // namespace
}  // namespace jagged_cuda
