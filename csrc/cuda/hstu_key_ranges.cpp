#include "cuda/glue.h"
#include "cuda/kernels/hstu_key_ranges.h"

#include <torch/csrc/stable/library.h>

namespace jagged_cuda {
namespace {

Tensor hstu_key_ranges(const Tensor& offsets_any, const std::optional<Tensor>& kv_offsets_any,
                       const std::optional<Tensor>& num_targets_any,
                       const std::optional<Tensor>& contextual_lens_any, int64_t contextual_len,
                       int64_t max_attn_len, int64_t min_full_attn_len, int64_t target_group,
                       bool causal, int64_t total) {
  constexpr const char* op = "hstu_key_ranges";
  static const Contract contract(op);
  contract.check({offsets_any, kv_offsets_any, num_targets_any, contextual_lens_any, contextual_len,
                  max_attn_len, min_full_attn_len, target_group, causal, total});
  const torch::stable::accelerator::DeviceGuard guard(offsets_any.get_device_index());
  const Tensor offsets = as_contiguous(op, offsets_any);
  maybe_validate_offsets(op, "offsets", offsets, total);
  std::optional<Tensor> kv_offsets;
  if (kv_offsets_any) {
    kv_offsets = as_contiguous(op, *kv_offsets_any);
    // The keys themselves are not here: nothing says how many rows they have.
    maybe_validate_offsets(op, "kv_offsets", *kv_offsets, kUnlimited, std::nullopt,
                           /*is_first=*/false);
  }
  const auto targets = checked_counts(op, "num_targets", num_targets_any),
             contextual = checked_counts(op, "contextual_lens", contextual_lens_any);
  const Tensor out = allocate(op, offsets, {total, 2, 2}, ScalarType::Int);
  if (total == 0) return out;

  HstuKeyRangesParams params{};
  params.q_offsets = view_offsets(offsets, total);
  params.kv_offsets = kv_offsets ? view_offsets(*kv_offsets, kUnlimited) : params.q_offsets;
  params.targets = view_counts(targets, 0);
  params.contextual = view_counts(contextual, contextual_len);
  params.rule = {max_attn_len, min_full_attn_len, target_group, causal};
  params.out = static_cast<KeyIntervals*>(out.mutable_data_ptr());
  check_cuda(op, launch_hstu_key_ranges(params, current_stream(offsets)));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CUDA, m) {
  m.impl("hstu_key_ranges", TORCH_BOX(&hstu_key_ranges));
}

}  // namespace
}  // namespace jagged_cuda
