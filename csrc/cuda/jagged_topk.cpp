#include "cuda/glue.h"
#include "cuda/kernels/jagged_topk.h"
#include "cuda/row_type.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

// score [T], offsets [B + 1], k [B] -> [T]
Tensor jagged_topk(const Tensor& score_any, const Tensor& offsets, const std::optional<Tensor>& k,
                   int64_t same_k) {
  constexpr const char* op = "jagged_topk";
  static const Contract contract(op);
  const Sizes sizes = contract.check({score_any, offsets, k, same_k});
  const torch::stable::accelerator::DeviceGuard guard(score_any.get_device_index());
  const Tensor score = as_contiguous(op, score_any), bounds = as_contiguous(op, offsets);
  maybe_validate_offsets(op, "offsets", bounds, sizes.T);
  const std::optional<Tensor> counts = checked_counts(op, "k", k);
  const Tensor keep = allocate(op, score, {sizes.T}, ScalarType::Bool);
  if (sizes.T == 0) return keep;

  JaggedTopkParams params;
  params.score = score.const_data_ptr();
  params.keep = static_cast<uint8_t*>(keep.mutable_data_ptr());
  params.offsets = view_offsets(bounds, sizes.T);
  params.k = view_counts(counts, same_k);
  params.type = row_type(score.scalar_type());
  check_cuda(op, launch_jagged_topk(params, current_stream(score)));
  return keep;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) { m.impl("jagged_topk", TORCH_BOX(&jagged_topk)); }

}  // namespace
}  // namespace jagged_cuda
