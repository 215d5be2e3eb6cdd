// jagged_flash_attention on the CPU, forward and backward (kernels/attention.inl).
//
// Forward: an item is a run of query rows of one sequence and head. Backward: an item is one
// sequence and key/value head with all its rows and keys, which computes logits once for all three
// gradients; where that would leave threads idle (few or very long sequences), it is split into
// items by keys, for dk and dv, and items by rows, for dq, which compute them twice. Both give the
// same bits.
#include "ops/jagged_flash_attention.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"
#include "ops/last_kernel.h"

namespace jagged_cuda::cpu {
namespace {

Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

// What both directions share; sizes of windows are cut to what makes a difference.
AttentionParams make_params(const JaggedFlashAttentionSizes& sizes, const Tensor& q,
                            const Tensor& k, const Tensor& v, int64_t window_left,
                            int64_t window_right, double scale) {
  AttentionParams params{};
  params.element = element_of(q);
  params.q = rows_of(q);
  params.k = rows_of(k);
  params.v = rows_of(v);
  params.heads = sizes.heads;
  params.kv_heads = sizes.kv_heads;
  params.dim_qk = sizes.dim_qk;
  params.dim_v = sizes.dim_v;
  params.window_left = std::min(window_left, sizes.total_q + sizes.total_kv);
  params.window_right = std::min(window_right, sizes.total_q + sizes.total_kv);
  params.scale = scale;
  return params;
}

struct SequencePairs {
  std::vector<Sequence> q, kv;
};

SequencePairs read_pairs(const char* op, const Tensor& offsets,
                         const std::optional<Tensor>& kv_offsets,
                         const JaggedFlashAttentionSizes& sizes, std::optional<int64_t> max_len) {
  SequencePairs pairs;
  pairs.q = read_sequences(op, "offsets", offsets, sizes.total_q, max_len);
  pairs.kv =
      kv_offsets ? read_sequences(op, "kv_offsets", *kv_offsets, sizes.total_kv, max_len) : pairs.q;
  return pairs;
}

// -inf for the rows of lse [Tq, H] that lie outside all sequences.
template <class T>
void fill_lse_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t heads,
                      T* lse) {
  const int64_t begin = sequences.empty() ? total : sequences.front().begin;
  const int64_t end = sequences.empty() ? total : sequences.back().begin + sequences.back().len;
  std::fill(lse, lse + begin * heads, -std::numeric_limits<T>::infinity());
  std::fill(lse + end * heads, lse + total * heads, -std::numeric_limits<T>::infinity());
}

void fill_lse_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t heads,
                      const Tensor& lse) {
  if (lse.scalar_type() == ScalarType::Double) {
    fill_lse_outside(sequences, total, heads, lse.mutable_data_ptr<double>());
  } else {
    fill_lse_outside(sequences, total, heads, lse.mutable_data_ptr<float>());
  }
}

// Multiply-adds of query rows [row_begin, row_end) against keys [key_begin, key_end): exact enough
// to balance threads.
int64_t attention_cost(const AttentionParams& params, const VisibleKeys& visible, int64_t row_begin,
                       int64_t row_end, int64_t key_begin, int64_t key_end) {
  constexpr int64_t kSamples = 8;
  const int64_t step = std::max<int64_t>(1, (row_end - row_begin) / kSamples);
  int64_t keys = 0;
  for (int64_t row = row_begin; row < row_end; row += step) {
    const int64_t begin = std::max(key_begin, visible.begin(row));
    const int64_t end = std::min(key_end, visible.end(row));
    keys += std::max<int64_t>(0, end - begin) * std::min(step, row_end - row);
  }
  const int64_t dims = params.dim_qk + params.dim_v;
  return (keys + 4 * (row_end - row_begin + key_end - key_begin) + 16) * (dims + 16);
}

std::tuple<Tensor, Tensor> jagged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor offsets,
                                                  std::optional<Tensor> kv_offsets,
                                                  int64_t window_left, int64_t window_right,
                                                  double scale, std::optional<int64_t> max_len,
                                                  bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_flash_attention";
  const JaggedFlashAttentionSizes sizes = parse_jagged_flash_attention(
      op, q, k, v, offsets, kv_offsets, window_left, window_right, max_len);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len);
  q = rows_contiguous(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  Tensor out = allocate(op, q, {sizes.total_q, sizes.heads, sizes.dim_v});
  Tensor lse = allocate(op, q, {sizes.total_q, sizes.heads}, lse_dtype(q.scalar_type()));
  const KernelTable& table = kernel_table();

  AttentionParams params = make_params(sizes, q, k, v, window_left, window_right, scale);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  zero_rows_outside(pairs.q, sizes.total_q,
                    sizes.heads * sizes.dim_v * element_bytes(params.element), params.out);
  fill_lse_outside(pairs.q, sizes.total_q, sizes.heads, lse);

  WorkList<AttentionItem> items;
  const int64_t item_rows = attention_item_rows(params);
  for (size_t seq = 0; seq < pairs.q.size(); ++seq) {
    AttentionItem item{};
    item.q = pairs.q[seq];
    item.kv = pairs.kv[seq];
    const VisibleKeys visible{item.kv.len - item.q.len, item.kv.len, params.window_left,
                              params.window_right};
    for (item.row_begin = 0; item.row_begin < item.q.len; item.row_begin += item_rows) {
      item.row_end = std::min(item.q.len, item.row_begin + item_rows);
      const int64_t cost =
          attention_cost(params, visible, item.row_begin, item.row_end,
                         visible.begin(item.row_begin), visible.end(item.row_end - 1));
      for (item.head = 0; item.head < sizes.heads; ++item.head) items.add(item, cost);
    }
  }
  const size_t bytes = params.element == Element::kDouble
                           ? scratch_bytes<AttentionForwardBuffers<double>>(params)
                           : scratch_bytes<AttentionForwardBuffers<float>>(params);
  const auto compute = table.of(params.element).attention_forward;
  items.run(bytes,
            [&](const AttentionItem& item, void* scratch) { compute(params, item, scratch); });
  record_kernel(table.name);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> jagged_flash_attention_backward(
    Tensor grad_out, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, Tensor offsets, std::optional<Tensor> kv_offsets, int64_t window_left,
    int64_t window_right, double scale, std::optional<int64_t> max_len, bool /*allow_tf32*/) {
  constexpr const char* op = "jagged_flash_attention_backward";
  const JaggedFlashAttentionSizes sizes =
      parse_jagged_flash_attention_backward(grad_out, grad_lse, q, k, v, out, lse, offsets,
                                            kv_offsets, window_left, window_right, max_len);
  const SequencePairs pairs = read_pairs(op, offsets, kv_offsets, sizes, max_len);
  q = rows_contiguous(op, q);
  k = rows_contiguous(op, k);
  v = rows_contiguous(op, v);
  out = rows_contiguous(op, out);
  grad_out = rows_contiguous(op, grad_out);
  lse = as_contiguous(op, lse);
  if (grad_lse) grad_lse = as_contiguous(op, *grad_lse);
  Tensor dq = allocate(op, q, {sizes.total_q, sizes.heads, sizes.dim_qk});
  Tensor dk = allocate(op, k, {sizes.total_kv, sizes.kv_heads, sizes.dim_qk});
  Tensor dv = allocate(op, v, {sizes.total_kv, sizes.kv_heads, sizes.dim_v});
  const KernelTable& table = kernel_table();

  AttentionParams params = make_params(sizes, q, k, v, window_left, window_right, scale);
  params.out_rows = rows_of(out);
  params.grad_out = rows_of(grad_out);
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  params.dq = dq.mutable_data_ptr();
  params.dk = dk.mutable_data_ptr();
  params.dv = dv.mutable_data_ptr();
  const int64_t bytes_each = element_bytes(params.element);
  zero_rows_outside(pairs.q, sizes.total_q, sizes.heads * sizes.dim_qk * bytes_each, params.dq);
  zero_rows_outside(pairs.kv, sizes.total_kv, sizes.kv_heads * sizes.dim_qk * bytes_each,
                    params.dk);
  zero_rows_outside(pairs.kv, sizes.total_kv, sizes.kv_heads * sizes.dim_v * bytes_each, params.dv);

  const size_t num_seqs = sizes.kv_heads > 0 ? pairs.q.size() : 0;
  const int64_t group = sizes.kv_heads > 0 ? sizes.heads / sizes.kv_heads : 0;
  const auto visible_keys = [&](size_t seq) {
    const int64_t q_len = pairs.q[seq].len, kv_len = pairs.kv[seq].len;
    return VisibleKeys{kv_len - q_len, kv_len, params.window_left, params.window_right};
  };
  std::vector<int64_t> costs(num_seqs);
  int64_t total_cost = 0;
  for (size_t seq = 0; seq < num_seqs; ++seq) {
    costs[seq] = group * attention_cost(params, visible_keys(seq), 0, pairs.q[seq].len, 0,
                                        pairs.kv[seq].len);
    total_cost += costs[seq] * sizes.kv_heads;
  }
  constexpr int64_t kSmallItem = 1 << 22;
  const int64_t num_threads = torch::stable::get_num_threads();
  const int64_t item_cost =
      std::max(kSmallItem, num_threads > 1 ? total_cost / (2 * num_threads) : total_cost);

  WorkList<AttentionItem> items;
  int64_t max_rows = 0, max_keys = 0;
  for (size_t seq = 0; seq < num_seqs; ++seq) {
    const VisibleKeys visible = visible_keys(seq);
    AttentionItem whole{};
    whole.q = pairs.q[seq];
    whole.kv = pairs.kv[seq];
    whole.row_end = whole.q.len;
    whole.key_end = whole.kv.len;
    whole.wants_dq = whole.wants_dkv = true;
    if (whole.q.len == 0 && whole.kv.len == 0) continue;
    const bool split = costs[seq] > item_cost;
    // Rows and keys that an item of a split sequence takes: whole blocks.
    const double share =
        split ? static_cast<double>(item_cost) / static_cast<double>(costs[seq]) : 1;
    const auto blocks = [&](int64_t len, int64_t block) {
      return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(len) * share) / block) *
             block;
    };
    const int64_t key_step = blocks(whole.kv.len, kKeyBlock);
    const int64_t row_step = blocks(whole.q.len, kQueryBlock);
    const auto add = [&](const AttentionItem& item) {
      items.add(item, 3 * group *
                          attention_cost(params, visible, item.row_begin, item.row_end,
                                         item.key_begin, item.key_end));
      max_rows = std::max(max_rows, item.row_end - item.row_begin);
      max_keys = std::max(max_keys, item.key_end - item.key_begin);
    };
    for (whole.head = 0; whole.head < sizes.kv_heads; ++whole.head) {
      if (!split) {
        add(whole);
        continue;
      }
      AttentionItem part = whole;
      part.wants_dq = false;
      for (part.key_begin = 0; part.key_begin < whole.key_end; part.key_begin += key_step) {
        part.key_end = std::min(whole.key_end, part.key_begin + key_step);
        add(part);
      }
      part = whole;
      part.wants_dkv = false;
      for (part.row_begin = 0; part.row_begin < whole.row_end; part.row_begin += row_step) {
        part.row_end = std::min(whole.row_end, part.row_begin + row_step);
        add(part);
      }
    }
  }
  const AttentionBackwardSize size{params, max_rows, max_keys};
  const size_t bytes = params.element == Element::kDouble
                           ? scratch_bytes<AttentionBackwardBuffers<double>>(size)
                           : scratch_bytes<AttentionBackwardBuffers<float>>(size);
  const auto compute = table.of(params.element).attention_backward;
  items.run(bytes, [&](const AttentionItem& item, void* scratch) { compute(size, item, scratch); });
  record_kernel(table.name);
  return {dq, dk, dv};
}

}  // namespace
}  // namespace jagged_cuda::cpu

STABLE_TORCH_LIBRARY_IMPL(jagged_cuda, CPU, m) {
  m.impl("jagged_flash_attention", TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention));
  m.impl("jagged_flash_attention_backward",
         TORCH_BOX(&jagged_cuda::cpu::jagged_flash_attention_backward));
}
