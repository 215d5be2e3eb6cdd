#include "cuda/glue.h"
#include "cuda/kernels/jagged_sessionize.h"
#include "cuda/row_type.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace jagged_cuda {
namespace {

// time [T], offsets [B + 1] -> [sessions + 1], [B + 1]
std::tuple<Tensor, Tensor> jagged_sessionize(const Tensor& time_any, const Tensor& offsets,
                                             double gap, int64_t sessions) {
  constexpr const char* op = "jagged_sessionize";
  static const Contract contract(op);
  const Sizes sizes = contract.check({time_any, offsets, gap, sessions});
  const torch::stable::accelerator::DeviceGuard guard(time_any.get_device_index());
  const Tensor time = as_contiguous(op, time_any), bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const Tensor session_offsets = allocate(op, bounds, {sessions + 1});
  const Tensor first_session = allocate(op, bounds, {sizes.B + 1});
  const int64_t ctas = num_session_ctas(sizes.T);
  Tensor counts = allocate(op, time, {ctas + 1}, ScalarType::Long);
  const Tensor starts = allocate(op, time, {num_start_words(sizes.T)}, ScalarType::Int);

  const JaggedSessionizeParams params{
      time.const_data_ptr(),
      session_offsets.mutable_data_ptr(),
      first_session.mutable_data_ptr(),
      view_offsets(bounds, sizes.T),
      sessions,
      SessionGap(gap),
      row_type(time.scalar_type()),
      static_cast<int64_t*>(counts.mutable_data_ptr()),
      static_cast<uint32_t*>(starts.mutable_data_ptr()),
  };
  check_cuda(op, launch_jagged_sessionize(params, current_stream(time)));
  maybe_validate_capacity(op, "sessions", torch::stable::narrow(counts, 0, ctas, 1), sessions);
  return {session_offsets, first_session};
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("jagged_sessionize", TORCH_BOX(&jagged_sessionize));
}

}  // namespace
}  // namespace jagged_cuda
