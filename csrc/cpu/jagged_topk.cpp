// jagged_topk on the CPU: items are sequences, each ordered only as far as its k best.
#include "contract/order.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/number.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "contract/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

template <class Score>
uint64_t key_of(Score score) {
  return ordered_key(score);
}
uint64_t key_of(torch::headeronly::Half score) {
  return ordered_float_bits<uint16_t>(score.x, kHalfInfinity);
}
uint64_t key_of(torch::headeronly::BFloat16 score) {
  return ordered_float_bits<uint16_t>(score.x, kBFloat16Infinity);
}

// The better of two rows has the greater pair: of equal scores, the later one.
using Ranked = std::pair<uint64_t, int64_t>;  // key, row

template <class Score>
void keep_best(const Score* scores, int64_t len, int64_t k, uint8_t* keep) {
  if (k == 0 || k >= len) {
    std::memset(keep, k > 0, static_cast<size_t>(len));
    return;
  }
  std::vector<Ranked> ranked(static_cast<size_t>(len));
  for (int64_t row = 0; row < len; ++row) {
    ranked[static_cast<size_t>(row)] = {key_of(scores[row]), row};
  }
  std::nth_element(ranked.begin(), ranked.begin() + k, ranked.end(), std::greater<Ranked>());
  std::memset(keep, 0, static_cast<size_t>(len));
  for (int64_t i = 0; i < k; ++i) keep[ranked[static_cast<size_t>(i)].second] = 1;
}

Tensor jagged_topk(Tensor score, const Tensor& offsets, const std::optional<Tensor>& k,
                   int64_t same_k) {
  constexpr const char* op = "jagged_topk";
  static const Contract contract(op);
  const Sizes sizes = contract.check({score, offsets, k, same_k});
  const auto sequences = read_sequences(op, "offsets", offsets, sizes.T);
  const auto counts = read_counts(op, "k", k, same_k, sizes.B);
  score = as_contiguous(op, score);
  Tensor out = allocate(op, score, {sizes.T}, ScalarType::Bool);
  uint8_t* keep = static_cast<uint8_t*>(out.mutable_data_ptr());
  zero_rows_outside(sequences, sizes.T, 1, keep);

  constexpr int64_t kRowCost = 40;  // to order it among others, in multiply-adds
  WorkList<int64_t> items;
  for (int64_t seq = 0; seq < sizes.B; ++seq) {
    items.add(seq, sequences[static_cast<size_t>(seq)].len * kRowCost);
  }
  with_elements(score, [&](const auto* scores) {
    items.run(0, [&](int64_t seq, void*) {
      const auto [begin, len] = sequences[static_cast<size_t>(seq)];
      keep_best(scores + begin, len, counts[static_cast<size_t>(seq)], keep + begin);
    });
  });
  record_kernel(kernel_table().name);
  return out;
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_topk", TORCH_BOX(&jagged_cuda::cpu::jagged_topk));
}
