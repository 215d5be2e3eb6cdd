// hstu_key_ranges on the CPU: items are sequences.
#include "contract/contract.h"
#include "contract/hstu_rule.h"

#include <torch/csrc/stable/library.h>

#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Tensor hstu_key_ranges(Tensor offsets, std::optional<Tensor> kv_offsets,
                       std::optional<Tensor> num_targets, std::optional<Tensor> contextual_lens,
                       int64_t contextual_len, int64_t max_attn_len, int64_t min_full_attn_len,
                       int64_t target_group, bool causal, int64_t total) {
  constexpr const char* op = "hstu_key_ranges";
  static const Contract contract(op);
  const Sizes sizes =
      contract.check({offsets, kv_offsets, num_targets, contextual_lens, contextual_len,
                      max_attn_len, min_full_attn_len, target_group, causal, total});
  const auto queries = read_sequences(op, "offsets", offsets, total);
  // The keys themselves are not here: nothing says how many rows they have.
  const auto keys =
      kv_offsets ? read_sequences(op, "kv_offsets", *kv_offsets, kUnlimited) : queries;
  const auto targets = read_counts(op, "num_targets", num_targets, 0, sizes.B);
  const auto contextual =
      read_counts(op, "contextual_lens", contextual_lens, contextual_len, sizes.B);
  Tensor out = allocate(op, offsets, {total, 2, 2}, ScalarType::Int);
  KeyIntervals* result = static_cast<KeyIntervals*>(out.mutable_data_ptr());
  zero_rows_outside(queries, total, sizeof(KeyIntervals), result);

  const HstuRule rule{max_attn_len, min_full_attn_len, target_group, causal};
  WorkList<size_t> items;
  constexpr int64_t kRowCost = 64;
  for (size_t seq = 0; seq < queries.size(); ++seq) items.add(seq, queries[seq].len * kRowCost);
  items.run(0, [&](size_t seq, void*) {
    const int64_t shift = keys[seq].len - queries[seq].len;
    for (int64_t row = 0; row < queries[seq].len; ++row) {
      result[queries[seq].begin + row] =
          rule.at(row + shift, keys[seq].len, targets[seq], contextual[seq]);
    }
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("hstu_key_ranges", TORCH_BOX(&jagged_cuda::cpu::hstu_key_ranges));
}
