// Attention over pairs of sequences, cut into items (kernels/attention.inl): what every operator of
// this family runs.
//
// Forward: an item is a run of query rows of one sequence and head. Backward: an item is one
// sequence and key/value head with all its rows and keys, which computes logits once for all three
// gradients; where that would leave threads idle (few or very long sequences), it is split into
// items by keys, for dk and dv, and items by rows, for dq, which compute them twice. Both give the
// same bits.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "contract/biases.h"
#include "cpu/kernels.h"
#include "cpu/sequences.h"
#include "cpu/work_list.h"

namespace jagged_cuda::cpu {

inline Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

// What both directions share, without a window or ranges of keys.
inline AttentionParams attention_params(const Sizes& sizes, const Rows& q, const Tensor& k,
                                        const Tensor& v, double scale) {
  AttentionParams params{};
  params.element = element_of(k);
  params.q = q;
  params.k = rows_of(k);
  params.v = rows_of(v);
  params.heads = sizes.H;
  params.kv_heads = sizes.G;
  params.dim_qk = sizes.D;
  params.dim_v = sizes.Dv;
  params.window_left = params.window_right = -1;
  params.scale = scale;
  return params;
}

// The same for attention between jagged tensors. Windows larger than any sequence are cut;
// `key_ranges` is contiguous.
inline AttentionParams flash_params(const Sizes& sizes, const Tensor& q, const Tensor& k,
                                    const Tensor& v, int64_t window_left, int64_t window_right,
                                    double scale, const std::optional<Tensor>& key_ranges) {
  AttentionParams params = attention_params(sizes, rows_of(q), k, v, scale);
  params.window_left = std::min(window_left, sizes.Tq + sizes.Tk);
  params.window_right = std::min(window_right, sizes.Tq + sizes.Tk);
  params.key_ranges = key_ranges ? key_ranges->const_data_ptr<int32_t>() : nullptr;
  params.num_key_ranges = sizes.R;
  return params;
}

struct SequencePairs {
  std::vector<Sequence> q, kv;
};

// Of the keys of each sequence the used part, by kv_lengths.
inline SequencePairs read_pairs(const char* op, const Tensor& offsets,
                                const std::optional<Tensor>& kv_offsets, const Sizes& sizes,
                                std::optional<int64_t> max_len,
                                const std::optional<Tensor>& kv_lengths) {
  SequencePairs pairs;
  pairs.q = read_sequences(op, "offsets", offsets, sizes.Tq, max_len);
  pairs.kv =
      kv_offsets ? read_sequences(op, "kv_offsets", *kv_offsets, sizes.Tk, max_len) : pairs.q;
  if (kv_lengths) {
    const auto lengths = read_counts(op, "kv_lengths", kv_lengths, 0, sizes.B);
    for (size_t seq = 0; seq < lengths.size(); ++seq)
      pairs.kv[seq].len = std::min(pairs.kv[seq].len, lengths[seq]);
  }
  return pairs;
}

// Adds what the backward pass reads and writes.
inline void add_gradients(AttentionParams& params, const Rows& out, const Rows& grad_out,
                          const Tensor& lse, const std::optional<Tensor>& grad_lse,
                          const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  params.out_rows = out;
  params.grad_out = grad_out;
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  params.dq = dq.mutable_data_ptr();
  params.dk = dk.mutable_data_ptr();
  params.dv = dv.mutable_data_ptr();
}

// Zeros for the gradients of rows outside all sequences, and with kv_lengths for those of all keys.
inline void zero_gradients_outside(const AttentionParams& params, const Sizes& sizes,
                                   const std::vector<Sequence>& queries,
                                   const std::vector<Sequence>& used_keys, bool kv_lengths) {
  const int64_t bytes_each = element_bytes(params.element);
  const std::vector<Sequence>& keys = kv_lengths ? std::vector<Sequence>() : used_keys;
  zero_rows_outside(queries, sizes.Tq, sizes.H * sizes.D * bytes_each, params.dq);
  zero_rows_outside(keys, sizes.Tk, sizes.G * sizes.D * bytes_each, params.dk);
  zero_rows_outside(keys, sizes.Tk, sizes.G * sizes.Dv * bytes_each, params.dv);
}

// Multiply-adds of query rows [row_begin, row_end) against keys [key_begin, key_end): exact enough
// to balance threads.
inline int64_t attention_cost(const AttentionParams& params, const VisibleKeys& visible,
                              int64_t row_begin, int64_t row_end, int64_t key_begin,
                              int64_t key_end) {
  constexpr int64_t kSamples = 8;
  const int64_t step = std::max<int64_t>(1, (row_end - row_begin) / kSamples);
  int64_t keys = 0;
  for (int64_t row = row_begin; row < row_end; row += step) {
    keys += visible.of(row).count_within(key_begin, key_end) * std::min(step, row_end - row);
  }
  const int64_t dims = params.dim_qk + params.dim_v;
  return (keys + 4 * (row_end - row_begin + key_end - key_begin) + 16) * (dims + 16);
}

// Fills params.out and params.lse for every row of the queries; the keys of a sequence have
// the same index in `keys`.
inline void run_attention_forward(const AttentionParams& params,
                                  const std::vector<Sequence>& queries,
                                  const std::vector<Sequence>& keys) {
  const KernelTable& table = kernel_table();
  WorkList<AttentionItem> items;
  const int64_t item_rows = attention_item_rows(params);
  for (size_t seq = 0; seq < queries.size(); ++seq) {
    AttentionItem item{};
    item.q = queries[seq];
    item.kv = keys[seq];
    const VisibleKeys visible = params.visible_keys(item.q, item.kv);
    for (item.row_begin = 0; item.row_begin < item.q.len; item.row_begin += item_rows) {
      item.row_end = std::min(item.q.len, item.row_begin + item_rows);
      const int64_t cost =
          attention_cost(params, visible, item.row_begin, item.row_end,
                         visible.begin(item.row_begin), visible.end(item.row_end - 1));
      for (item.head = 0; item.head < params.heads; ++item.head) items.add(item, cost);
    }
  }
  const size_t bytes = scratch_bytes<AttentionForwardBuffers>(params.element, params);
  const auto compute = table.of(params.element).attention_forward;
  items.run(bytes,
            [&](const AttentionItem& item, void* scratch) { compute(params, item, scratch); });
}

// Fills params.dq, params.dk and params.dv for every row of the queries and keys.
inline void run_attention_backward(const AttentionParams& params,
                                   const std::vector<Sequence>& queries,
                                   const std::vector<Sequence>& keys) {
  const KernelTable& table = kernel_table();
  const size_t num_seqs = params.kv_heads > 0 ? queries.size() : 0;
  const int64_t group = params.kv_heads > 0 ? params.heads / params.kv_heads : 0;
  const auto visible_keys = [&](size_t seq) {
    return params.visible_keys(queries[seq], keys[seq]);
  };
  std::vector<int64_t> costs(num_seqs);
  int64_t total_cost = 0;
  for (size_t seq = 0; seq < num_seqs; ++seq) {
    costs[seq] =
        group * attention_cost(params, visible_keys(seq), 0, queries[seq].len, 0, keys[seq].len);
    total_cost += costs[seq] * params.kv_heads;
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
    whole.q = queries[seq];
    whole.kv = keys[seq];
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
    for (whole.head = 0; whole.head < params.kv_heads; ++whole.head) {
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
  const size_t bytes = scratch_bytes<AttentionBackwardBuffers>(params.element, size);
  const auto compute = table.of(params.element).attention_backward;
  items.run(bytes, [&](const AttentionItem& item, void* scratch) { compute(size, item, scratch); });
}

// Sums [outer, heads, inner] over the H / heads query heads that share one of `heads` columns of a
// bias, and over `parts` of all that, into [outer, heads, inner].
template <class T>
void sum_heads(const T* sums, T* out, int64_t parts, int64_t outer, int64_t query_heads,
               int64_t heads, int64_t inner) {
  const int64_t group = query_heads / heads;
  for (int64_t at = 0; at < outer; ++at) {
    for (int64_t head = 0; head < heads; ++head) {
      T* to = out + (at * heads + head) * inner;
      std::fill_n(to, inner, T(0));
      for (int64_t part = 0; part < parts; ++part) {
        for (int64_t each = head * group; each < (head + 1) * group; ++each) {
          const T* from = sums + ((part * outer + at) * query_heads + each) * inner;
          for (int64_t i = 0; i < inner; ++i) to[i] += from[i];
        }
      }
    }
  }
}

inline void sum_heads(const Tensor& sums, Tensor& out, int64_t parts, int64_t outer,
                      int64_t query_heads, int64_t heads, int64_t inner) {
  if (out.numel() == 0) return;
  if (out.scalar_type() == ScalarType::Double) {
    sum_heads(sums.const_data_ptr<double>(), out.mutable_data_ptr<double>(), parts, outer,
              query_heads, heads, inner);
  } else {
    sum_heads(sums.const_data_ptr<float>(), out.mutable_data_ptr<float>(), parts, outer,
              query_heads, heads, inner);
  }
}

// Fills the gradients of the tables: kParts runs of queries, whatever the number of threads, sum
// into tables of their own, which are added in order.
inline void run_table_gradients(const char* op, AttentionParams params, const Tensor& like,
                                const std::vector<Sequence>& queries,
                                const std::vector<Sequence>& keys, int64_t total,
                                BiasGradients& gradients) {
  constexpr int64_t kParts = 32;
  params.key_sums = nullptr;
  const auto zeros = [&](int64_t buckets) {
    Tensor made =
        allocate(op, like, {kParts, params.heads, buckets}, sum_dtype(like.scalar_type()));
    torch::stable::zero_(made);
    return made;
  };
  const ScoreBias& bias = params.bias;
  const bool has_time = bias.time_table != nullptr, has_position = bias.position_table != nullptr;
  const Tensor time = zeros(has_time ? bias.time_buckets : 0),
               position = zeros(has_position ? bias.position_buckets : 0);
  const auto part_of = [&](const Tensor& sums, int64_t part) {
    const int64_t bytes = sums.scalar_type() == ScalarType::Double ? 8 : 4;
    return static_cast<char*>(sums.mutable_data_ptr()) + part * params.heads * sums.size(2) * bytes;
  };
  struct Part {
    int64_t begin, end, index;
  };
  WorkList<Part> parts;
  for (int64_t part = 0; part < kParts; ++part) {
    parts.add({total * part / kParts, total * (part + 1) / kParts, part},
              total / kParts * params.heads * (params.dim_qk + params.dim_v) * 64);
  }
  int64_t max_rows = 0, max_keys = 0;
  for (size_t seq = 0; seq < queries.size(); ++seq) {
    max_rows = std::max(max_rows, queries[seq].len);
    max_keys = std::max(max_keys, keys[seq].len);
  }
  const AttentionBackwardSize size{params, max_rows, max_keys};
  const auto compute = kernel_table().of(params.element).attention_backward;
  parts.run(scratch_bytes<AttentionBackwardBuffers>(params.element, size),
            [&](const Part& part, void* scratch) {
              for (size_t seq = 0; seq < queries.size(); ++seq) {
                AttentionItem item{};
                item.q = queries[seq];
                item.kv = keys[seq];
                item.row_begin = std::max<int64_t>(0, part.begin - item.q.begin);
                item.row_end = std::min(item.q.len, part.end - item.q.begin);
                item.key_end = item.kv.len;
                if (item.row_begin >= item.row_end || item.key_end == 0) continue;
                item.time_sums = has_time ? part_of(time, part.index) : nullptr;
                item.position_sums = has_position ? part_of(position, part.index) : nullptr;
                for (item.head = 0; item.head < params.kv_heads; ++item.head)
                  compute(size, item, scratch);
              }
            });
  sum_heads(time, gradients.time_table, kParts, 1, params.heads, gradients.time_table.size(0),
            gradients.time_table.size(1));
  sum_heads(position, gradients.position_table, kParts, 1, params.heads,
            gradients.position_table.size(0), gradients.position_table.size(1));
}

// run_attention_backward, and the gradients of biases that are wanted.
inline void run_attention_backward(const char* op, AttentionParams params, const Tensor& like,
                                   const Sizes& sizes, const SequencePairs& pairs,
                                   const Biases& biases, bool kv_bias_gradient,
                                   bool table_gradients, BiasGradients& gradients) {
  zero_gradients_outside(params, sizes, pairs.q, pairs.kv, biases.kv_lengths.has_value());
  if (kv_bias_gradient && biases.kv_bias) {
    Tensor sums = allocate(op, like, {sizes.Tk, sizes.H}, sum_dtype(like.scalar_type()));
    torch::stable::zero_(sums);
    params.key_sums = sums.mutable_data_ptr();
    run_attention_backward(params, pairs.q, pairs.kv);
    sum_heads(sums, gradients.kv_bias, 1, sizes.Tk, sizes.H, sizes.Hb, 1);
  } else {
    run_attention_backward(params, pairs.q, pairs.kv);
  }
  if (table_gradients && params.bias.has_tables()) {
    run_table_gradients(op, params, like, pairs.q, pairs.kv, sizes.Tq, gradients);
  }
}

}  // namespace jagged_cuda::cpu
