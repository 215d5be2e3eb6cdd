// jagged_flash_attention, and jagged_hstu_attention, where silu(score) is in the place of a
// probability: blocks of kQueryBlock query rows against blocks of kKeyBlock keys, both
// counted from the start of their sequence, so that a row's result depends on its sequence alone.
//
// q is multiplied by scale as it is loaded: logits need no scale then, dk = dS^T q comes out right,
// and dq = scale * dS k is scaled once at the end.

// The part [begin, end) of a key block that some row of a query block sees. `begin` is rounded down
// to whole vectors; entries of a row that it does not see become exactly 0.
struct ScoreColumns {
  int64_t begin, end;
};

template <class T>
ScoreColumns score_columns(const VisibleKeys& visible, int64_t row_begin, int64_t row_end,
                           int64_t key_begin, int64_t keys) {
  int64_t begin = std::max<int64_t>(0, visible.begin(row_begin) - key_begin);
  int64_t end = std::min(keys, visible.end(row_end - 1) - key_begin);
  if (visible.ranges != nullptr) {
    const int64_t first = begin, last = end;
    begin = keys, end = 0;
    const auto include = [&](int64_t from, int64_t to) {
      if (std::max(from, first) >= std::min(to, last)) return;
      begin = std::min(begin, std::max(from, first));
      end = std::max(end, std::min(to, last));
    };
    for (int64_t row = row_begin; row < row_end; ++row) {
      const RowKeys seen = visible.of(row).counted_from(key_begin);
      include(seen.begin, seen.gap_begin);
      include(seen.gap_end, seen.end);
    }
  }
  return {begin / kLanes<T> * kLanes<T>, end};
}

// Replaces what a row does not see; `keys` is counted from the first key of the block.
template <class T>
void fill_outside(T* row, const RowKeys& keys, const ScoreColumns& columns, T value) {
  const int64_t last = columns.begin + round_up(columns.end - columns.begin, kLanes<T>);
  const bool has_gap = keys.has_gap();
  const int64_t begin = std::clamp(keys.begin, columns.begin, last);
  const int64_t end = std::clamp(has_gap ? keys.end : keys.gap_begin, begin, last);
  std::fill(row + columns.begin, row + begin, value);
  std::fill(row + end, row + last, value);
  if (has_gap) {
    const int64_t gap_begin = std::clamp(keys.gap_begin, begin, end);
    std::fill(row + gap_begin, row + std::clamp(keys.gap_end, gap_begin, end), value);
  }
}

// Logits of one row into exp(logit - max), with the running max and sum of the row. Returns the
// factor for earlier sums of this row.
template <class T>
JAGGED_INLINE T softmax_row(T* row, const RowKeys& keys, const ScoreColumns& columns, T& max,
                            T& sum) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  fill_outside(row, keys, columns, -kInfinity);
  Vector<T> lane_max = broadcast(max);
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    lane_max = vector_max<T>(load(row + j), lane_max);
  }
  const T new_max = reduce_max<T>(lane_max);
  const T subtracted = new_max == -kInfinity ? T(0) : new_max;
  const T rescale = max == new_max ? T(1) : std::exp(max - subtracted);
  Vector<T> lane_sum{};
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    const Vector<T> e = vector_exp<T>(load(row + j) - subtracted);
    store<T>(row + j, e);
    lane_sum += e;
  }
  max = new_max;
  sum = sum * rescale + reduce_sum<T>(lane_sum);
  return rescale;
}

// 1 / (1 + exp(-z)); 0 where exp(-z) is infinite, so that z times it is 0, such as of the least float.
template <class T>
JAGGED_INLINE Vector<T> sigmoid(Vector<T> z) {
  return T(1) / (T(1) + vector_exp<T>(-z));
}

// silu(logit) in place of the logits of one row.
template <class T>
JAGGED_INLINE void silu_row(T* row, const RowKeys& keys, const ScoreColumns& columns) {
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    const Vector<T> z = load(row + j);
    store<T>(row + j, z * sigmoid<T>(z));
  }
  fill_outside(row, keys, columns, T(0));
}

// Adds the biases to the logits of a row; `key_block` is the first key of the block.
template <class T>
void add_biases(T* score, const AttentionParams& p, const AttentionItem& item, int64_t head,
                int64_t row, int64_t key_block, const ScoreColumns& columns) {
  const ScoreBias& bias = p.bias;
  const int64_t key = item.kv.begin + key_block;
  if (bias.kv_bias != nullptr) {
    const int64_t column = head / (p.heads / bias.kv_heads);
    const T* added = static_cast<const T*>(bias.kv_bias) + key * bias.kv_heads + column;
    for (int64_t j = columns.begin; j < columns.end; ++j) score[j] += added[j * bias.kv_heads];
  }
  if (bias.time_table != nullptr) {
    const T* table = static_cast<const T*>(bias.time_table) +
                     head / (p.heads / bias.time_heads) * bias.time_buckets;
    const int64_t now = bias.q_time[item.q.begin + row];
    for (int64_t j = columns.begin; j < columns.end; ++j)
      score[j] += table[bias.time_bucket(now, bias.kv_time[key + j])];
  }
  if (bias.position_table != nullptr) {
    const T* table = static_cast<const T*>(bias.position_table) +
                     head / (p.heads / bias.position_heads) * bias.position_buckets;
    const int64_t distance = row + item.kv.len - item.q.len - key_block;
    for (int64_t j = columns.begin; j < columns.end; ++j)
      score[j] += table[bias.position_bucket(distance - j)];
  }
}

// Adds dS of a row, 0 where a key is not seen, to the sums of its buckets.
template <class T>
void add_to_buckets(const T* dscore, const AttentionParams& p, const AttentionItem& item,
                    int64_t head, int64_t row, int64_t key_block, const ScoreColumns& columns) {
  const ScoreBias& bias = p.bias;
  if (item.time_sums != nullptr) {
    T* sums = static_cast<T*>(item.time_sums) + head * bias.time_buckets;
    const int64_t now = bias.q_time[item.q.begin + row];
    const int64_t* then = bias.kv_time + item.kv.begin + key_block;
    for (int64_t j = columns.begin; j < columns.end; ++j)
      sums[bias.time_bucket(now, then[j])] += dscore[j];
  }
  if (item.position_sums != nullptr) {
    T* sums = static_cast<T*>(item.position_sums) + head * bias.position_buckets;
    const int64_t distance = row + item.kv.len - item.q.len - key_block;
    for (int64_t j = columns.begin; j < columns.end; ++j)
      sums[bias.position_bucket(distance - j)] += dscore[j];
  }
}

template <class T>
const void* rows_at(const Rows& rows, Element element, int64_t row, int64_t head) {
  return element_at(rows.data, element, row * rows.row_stride + head * rows.head_stride);
}

// Keys or values [kKeyBlock, dst_row] of one head, zeros up to a whole vector of rows.
template <class T>
void load_keys(T* dst, int64_t dst_row, const Rows& src, Element element, int64_t begin,
               int64_t keys, int64_t head, int64_t dim) {
  load_rows(dst, dst_row, rows_at<T>(src, element, begin, head), src.row_stride, element, keys,
            round_up(keys, std::max<int64_t>(4, kLanes<T>)), dim);
}

template <class T>
void attention_forward(const AttentionParams& p, const AttentionItem& item, void* scratch) {
  Arena arena(scratch);
  const AttentionForwardBuffers<T> buffers{arena, p};
  const VisibleKeys visible = p.visible_keys(item.q, item.kv);
  const int64_t rows = item.row_end - item.row_begin;
  const int64_t first_row = item.q.begin + item.row_begin;  // in the whole tensor
  const int64_t kv_head = item.head / (p.heads / p.kv_heads);
  const int64_t out_columns = round_up(p.dim_v, kLanes<T>);

  load_rows(buffers.q, buffers.qk_row, rows_at<T>(p.q, p.element, first_row, item.head),
            p.q.row_stride, p.element, rows, rows, p.dim_qk);
  scale_rows(buffers.q, buffers.qk_row, rows, p.dim_qk, T(p.scale));
  std::fill_n(buffers.out, rows * buffers.v_row, T(0));
  std::fill_n(buffers.max, rows, -std::numeric_limits<T>::infinity());
  std::fill_n(buffers.sum, rows, T(0));

  const int64_t keys_end = visible.end(item.row_end - 1);
  int64_t key_block = visible.begin(item.row_begin) / kKeyBlock * kKeyBlock;
  for (; key_block < keys_end; key_block += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, item.kv.len - key_block);
    const int64_t first_key = item.kv.begin + key_block;
    bool keys_loaded = false;

    for (int64_t block = 0; block < rows; block += kQueryBlock) {
      const int64_t block_rows = std::min(kQueryBlock, rows - block);
      const int64_t row_begin = item.row_begin + block;
      const ScoreColumns columns =
          score_columns<T>(visible, row_begin, row_begin + block_rows, key_block, keys);
      if (columns.begin >= columns.end) continue;
      if (!keys_loaded) {
        keys_loaded = true;
        load_keys(buffers.k, buffers.qk_row, p.k, p.element, first_key, keys, kv_head, p.dim_qk);
        transpose(buffers.k, buffers.qk_row, round_up(keys, kLanes<T>), p.dim_qk,
                  buffers.k_transposed, kScoreRow);
        load_keys(buffers.v, buffers.v_row, p.v, p.element, first_key, keys, kv_head, p.dim_v);
      }

      Product<T> logits{};  // [block_rows, columns] = q k^T
      logits.rows = block_rows;
      logits.columns = round_up(columns.end - columns.begin, kLanes<T>);
      logits.depth = p.dim_qk;
      logits.a = buffers.q + block * buffers.qk_row;
      logits.a_row = buffers.qk_row;
      logits.a_step = 1;
      logits.b = buffers.k_transposed + columns.begin;
      logits.b_row = kScoreRow;
      logits.c = buffers.score + columns.begin;
      logits.c_row = kScoreRow;
      multiply(logits);

      for (int64_t i = 0; i < block_rows; ++i) {
        T* score = buffers.score + i * kScoreRow;
        const RowKeys seen = visible.of(row_begin + i).counted_from(key_block);
        if (p.bias.any()) {
          add_biases(score, p, item, item.head, row_begin + i, key_block, columns);
        }
        if (p.silu) {
          silu_row<T>(score, seen, columns);
          buffers.rescale[i] = T(1);
        } else {
          buffers.rescale[i] =
              softmax_row<T>(score, seen, columns, buffers.max[block + i], buffers.sum[block + i]);
        }
      }

      Product<T> values{};  // out [block_rows, dim_v] = rescale out + P v
      values.rows = block_rows;
      values.columns = out_columns;
      values.depth = columns.end - columns.begin;
      values.a = buffers.score + columns.begin;
      values.a_row = kScoreRow;
      values.a_step = 1;
      values.b = buffers.v + columns.begin * buffers.v_row;
      values.b_row = buffers.v_row;
      values.c = buffers.out + block * buffers.v_row;
      values.c_row = buffers.v_row;
      values.rescale = buffers.rescale;
      multiply(values);
    }
  }

  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  T* lse = static_cast<T*>(p.lse);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = item.row_begin + i, index = (first_row + i) * p.heads + item.head;
    T* out = buffers.out + i * buffers.v_row;
    void* result = element_at(p.out, p.element, index * p.dim_v);
    if (p.silu) {
      if (!visible.of(row).empty()) {
        scale_rows(out, buffers.v_row, 1, p.dim_v, p.row_weight<T>(first_row + i, item.kv.len));
      }
      store_elements(result, out, p.element, p.dim_v);
      continue;
    }
    // A row that sees keys whose logits are all -inf is NaN, as softmax is; one that sees none, or
    // none but those which kv_bias hides, is 0.
    const bool hidden = p.bias.kv_bias != nullptr && buffers.max[i] == -kInfinity;
    if (hidden) std::fill_n(out, p.dim_v, T(0));
    if (!hidden && !visible.of(row).empty()) {
      scale_rows(out, buffers.v_row, 1, p.dim_v, 1 / buffers.sum[i]);
    }
    store_elements(result, out, p.element, p.dim_v);
    lse[index] = buffers.max[i] + std::log(buffers.sum[i]);
  }
}

// P = exp(logits - lse) in place of the logits, dS = P (dP - delta) in place of dP.
template <class T>
JAGGED_INLINE void softmax_grad_row(T* prob, T* dscore, const RowKeys& keys,
                                    const ScoreColumns& columns, T lse, T delta) {
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    const Vector<T> e = vector_exp<T>(load(prob + j) - lse);
    store<T>(prob + j, e);
    store<T>(dscore + j, e * (load(dscore + j) - delta));
  }
  fill_outside(prob, keys, columns, T(0));
  fill_outside(dscore, keys, columns, T(0));
}

// Whether one block holds all keys of a sequence. Then delta is the mean of dP, weighted by P, as
// exact as they are, less grad_lse. Else it is rowsum(grad_out * out) - grad_lse: what rounds out
// may be most of a small dP - delta, such as that of a key whose P is near 1.
inline bool is_one_block(const Sequence& keys) { return keys.len <= kKeyBlock; }

// P in place of the logits; 0 in place of dP where a key is not seen.
template <class T>
JAGGED_INLINE void probability_row(T* prob, T* dprob, const RowKeys& keys,
                                   const ScoreColumns& columns, T lse) {
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    store<T>(prob + j, vector_exp<T>(load(prob + j) - lse));
  }
  fill_outside(prob, keys, columns, T(0));
  fill_outside(dprob, keys, columns, T(0));
}

// dS in place of dP, of a row whose keys are all in the block.
template <class T>
JAGGED_INLINE void subtract_mean_row(const T* prob, T* dscore, const RowKeys& keys,
                                     const ScoreColumns& columns, T grad_lse) {
  Vector<T> lane_sum{}, lane_product{};
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    const Vector<T> e = load(prob + j);
    lane_sum += e;
    lane_product += e * load(dscore + j);
  }
  // The sum is about 1, as lse is rounded; 0 where no key is seen, or kv_bias hides all.
  const T sum = reduce_sum<T>(lane_sum), product = reduce_sum<T>(lane_product);
  const T delta = (sum == T(0) ? T(0) : product / sum) - grad_lse;
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    store<T>(dscore + j, load(prob + j) * (load(dscore + j) - delta));
  }
  if (!std::isfinite(delta)) fill_outside(dscore, keys, columns, T(0));
}

// The same of silu: weight silu(z) in place of the logits z, weight silu'(z) dP in place of dP.
template <class T>
JAGGED_INLINE void silu_grad_row(T* score, T* dscore, const RowKeys& keys,
                                 const ScoreColumns& columns, T weight) {
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    const Vector<T> z = load(score + j), gate = sigmoid<T>(z);
    store<T>(score + j, weight * (z * gate));
    store<T>(dscore + j, weight * gate * (T(1) + z * (T(1) - gate)) * load(dscore + j));
  }
  fill_outside(score, keys, columns, T(0));
  fill_outside(dscore, keys, columns, T(0));
}

// Rows [first, first + rows) of grad_out; rows that see nothing count as 0 whatever is there.
template <class T>
void load_grad_out(const AttentionParams& p, const AttentionItem& item, const VisibleKeys& visible,
                   int64_t head, int64_t first, int64_t rows, T* dst, int64_t dst_row) {
  load_rows(dst, dst_row, rows_at<T>(p.grad_out, p.element, item.q.begin + first, head),
            p.grad_out.row_stride, p.element, rows, rows, p.dim_v);
  for (int64_t i = 0; i < rows; ++i) {
    if (visible.of(first + i).empty()) {
      std::fill_n(dst + i * dst_row, round_up(p.dim_v, kLanes<T>), T(0));
    }
  }
}

// lse and delta = rowsum(grad_out * out) - grad_lse of the item's rows, or their weights; where
// is_one_block, grad_lse in place of delta.
template <class T>
void load_row_statistics(const AttentionParams& p, const AttentionItem& item,
                         const VisibleKeys& visible, int64_t head,
                         const AttentionBackwardBuffers<T>& buffers) {
  const T* lse = static_cast<const T*>(p.lse);
  const T* grad_lse = static_cast<const T*>(p.grad_lse);
  if (p.silu) {
    for (int64_t row = item.row_begin; row < item.row_end; ++row) {
      buffers.delta[row - item.row_begin] = p.row_weight<T>(item.q.begin + row, item.kv.len);
    }
    return;
  }
  const bool one_block = is_one_block(item.kv);
  for (int64_t row = item.row_begin; row < item.row_end; row += kQueryBlock) {
    const int64_t rows = std::min(kQueryBlock, item.row_end - row);
    if (!one_block) {
      load_grad_out(p, item, visible, head, row, rows, buffers.grad_out, buffers.v_row);
      load_rows(buffers.out, buffers.v_row,
                rows_at<T>(p.out_rows, p.element, item.q.begin + row, head), p.out_rows.row_stride,
                p.element, rows, rows, p.dim_v);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t index = (item.q.begin + row + i) * p.heads + head;
      const int64_t local = row + i - item.row_begin;
      // Of a row all of whose keys kv_bias hides: their P is 0 then. Likewise where an LSE of f32 is
      // below -2^24, from where on its neighbours are 2 apart: P would be up to 1 for each key.
      constexpr T kLeast = sizeof(T) == 4 ? T(-16777216) : std::numeric_limits<T>::lowest();
      const bool hidden = p.bias.any() && lse[index] < kLeast;
      buffers.lse[local] = hidden ? T(0) : lse[index];
      const T of_lse = grad_lse != nullptr ? grad_lse[index] : T(0);
      if (one_block) {
        buffers.delta[local] = of_lse;
        continue;
      }
      Vector<T> product{};
      for (int64_t j = 0; j < p.dim_v; j += kLanes<T>) {
        product += load(buffers.grad_out + i * buffers.v_row + j) *
                   load(buffers.out + i * buffers.v_row + j);
      }
      buffers.delta[local] = reduce_sum<T>(product) - of_lse;
    }
  }
}

template <class T>
void store_grad(void* grad, Element element, int64_t first, int64_t rows, int64_t heads,
                int64_t head, int64_t dim, const T* src, int64_t src_row) {
  for (int64_t i = 0; i < rows; ++i) {
    store_elements(element_at(grad, element, ((first + i) * heads + head) * dim), src + i * src_row,
                   element, dim);
  }
}

// Sums run over key blocks (dq) and over heads and query blocks (dk, dv) in order, however rows and
// keys are split into items: results do not depend on the split.
template <class T>
void attention_backward(const AttentionBackwardSize& size, const AttentionItem& item,
                        void* scratch) {
  const AttentionParams& p = size.params;
  Arena arena(scratch);
  const AttentionBackwardBuffers<T> buffers{arena, size};
  const VisibleKeys visible = p.visible_keys(item.q, item.kv);
  const int64_t item_rows = item.row_end - item.row_begin;
  const int64_t item_keys = item.key_end - item.key_begin;
  const int64_t group = p.heads / p.kv_heads, kv_head = item.head;
  const bool one_block = !p.silu && is_one_block(item.kv);
  const int64_t qk_columns = round_up(p.dim_qk, kLanes<T>);
  const int64_t v_columns = round_up(p.dim_v, kLanes<T>);
  if (item.wants_dkv) {
    std::fill_n(buffers.dk, item_keys * buffers.qk_row, T(0));
    std::fill_n(buffers.dv, item_keys * buffers.v_row, T(0));
  }

  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    load_row_statistics(p, item, visible, head, buffers);
    if (item.wants_dq) std::fill_n(buffers.dq, item_rows * buffers.qk_row, T(0));
    const bool sums_keys = item.wants_dkv && p.key_sums != nullptr;
    if (sums_keys) std::fill_n(buffers.key_sums, item_keys, T(0));

    for (int64_t key_block = item.key_begin; key_block < item.key_end; key_block += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, item.key_end - key_block);
      const int64_t first_key = item.kv.begin + key_block;
      bool keys_loaded = false;

      for (int64_t block = item.row_begin; block < item.row_end; block += kQueryBlock) {
        const int64_t rows = std::min(kQueryBlock, item.row_end - block);
        const ScoreColumns columns =
            score_columns<T>(visible, block, block + rows, key_block, keys);
        if (columns.begin >= columns.end) continue;
        if (!keys_loaded) {
          keys_loaded = true;
          load_keys(buffers.k, buffers.qk_row, p.k, p.element, first_key, keys, kv_head, p.dim_qk);
          load_keys(buffers.v, buffers.v_row, p.v, p.element, first_key, keys, kv_head, p.dim_v);
          transpose(buffers.k, buffers.qk_row, round_up(keys, kLanes<T>), p.dim_qk,
                    buffers.k_transposed, kScoreRow);
          transpose(buffers.v, buffers.v_row, round_up(keys, kLanes<T>), p.dim_v,
                    buffers.v_transposed, kScoreRow);
        }
        load_rows(buffers.q, buffers.qk_row, rows_at<T>(p.q, p.element, item.q.begin + block, head),
                  p.q.row_stride, p.element, rows, rows, p.dim_qk);
        scale_rows(buffers.q, buffers.qk_row, rows, p.dim_qk, T(p.scale));
        load_grad_out(p, item, visible, head, block, rows, buffers.grad_out, buffers.v_row);

        const int64_t score_count = columns.end - columns.begin;
        Product<T> scores{};  // [rows, columns] = q k^T, and = grad_out v^T
        scores.rows = rows;
        scores.columns = round_up(score_count, kLanes<T>);
        scores.depth = p.dim_qk;
        scores.a = buffers.q;
        scores.a_row = buffers.qk_row;
        scores.a_step = 1;
        scores.b = buffers.k_transposed + columns.begin;
        scores.b_row = kScoreRow;
        scores.c = buffers.prob + columns.begin;
        scores.c_row = kScoreRow;
        multiply(scores);
        scores.depth = p.dim_v;
        scores.a = buffers.grad_out;
        scores.a_row = buffers.v_row;
        scores.b = buffers.v_transposed + columns.begin;
        scores.c = buffers.dscore + columns.begin;
        multiply(scores);

        for (int64_t i = 0; i < rows; ++i) {
          const int64_t local = block + i - item.row_begin;
          T *score = buffers.prob + i * kScoreRow, *dscore = buffers.dscore + i * kScoreRow;
          const RowKeys seen = visible.of(block + i).counted_from(key_block);
          if (p.bias.any()) add_biases(score, p, item, head, block + i, key_block, columns);
          if (p.silu) {
            silu_grad_row<T>(score, dscore, seen, columns, buffers.delta[local]);
          } else if (one_block) {
            probability_row<T>(score, dscore, seen, columns, buffers.lse[local]);
          } else {
            softmax_grad_row<T>(score, dscore, seen, columns, buffers.lse[local],
                                buffers.delta[local]);
          }
        }
        for (int64_t i = 0; i < rows; ++i) {
          const T* prob = buffers.prob + i * kScoreRow;
          T* dscore = buffers.dscore + i * kScoreRow;
          if (one_block) {
            const RowKeys seen = visible.of(block + i).counted_from(key_block);
            subtract_mean_row<T>(prob, dscore, seen, columns,
                                 buffers.delta[block + i - item.row_begin]);
          }
          add_to_buckets(dscore, p, item, head, block + i, key_block, columns);
          if (sums_keys) {
            T* sums = buffers.key_sums + key_block - item.key_begin;
            for (int64_t j = columns.begin; j < columns.end; ++j) sums[j] += dscore[j];
          }
        }

        if (item.wants_dkv) {
          const int64_t key = key_block - item.key_begin + columns.begin;
          Product<T>
              grads{};  // dv [columns, dim_v] += P^T grad_out, dk [columns, dim_qk] += dS^T q
          grads.rows = score_count;
          grads.columns = v_columns;
          grads.depth = rows;
          grads.a = buffers.prob + columns.begin;
          grads.a_row = 1;
          grads.a_step = kScoreRow;
          grads.b = buffers.grad_out;
          grads.b_row = buffers.v_row;
          grads.c = buffers.dv + key * buffers.v_row;
          grads.c_row = buffers.v_row;
          grads.add = true;
          multiply(grads);
          grads.columns = qk_columns;
          grads.a = buffers.dscore + columns.begin;
          grads.b = buffers.q;
          grads.b_row = buffers.qk_row;
          grads.c = buffers.dk + key * buffers.qk_row;
          grads.c_row = buffers.qk_row;
          multiply(grads);
        }
        if (item.wants_dq) {
          Product<T> grads{};  // dq [rows, dim_qk] += dS k
          grads.rows = rows;
          grads.columns = qk_columns;
          grads.depth = score_count;
          grads.a = buffers.dscore + columns.begin;
          grads.a_row = kScoreRow;
          grads.a_step = 1;
          grads.b = buffers.k + columns.begin * buffers.qk_row;
          grads.b_row = buffers.qk_row;
          grads.c = buffers.dq + (block - item.row_begin) * buffers.qk_row;
          grads.c_row = buffers.qk_row;
          grads.add = true;
          multiply(grads);
        }
      }
    }
    if (item.wants_dq) {
      scale_rows(buffers.dq, buffers.qk_row, item_rows, p.dim_qk, T(p.scale));
      store_grad(p.dq, p.element, item.q.begin + item.row_begin, item_rows, p.heads, head, p.dim_qk,
                 buffers.dq, buffers.qk_row);
    }
    for (int64_t key = 0; sums_keys && key < item_keys; ++key) {
      const int64_t row = item.kv.begin + item.key_begin + key;
      static_cast<T*>(p.key_sums)[row * p.heads + head] = buffers.key_sums[key];
    }
  }
  if (item.wants_dkv) {
    const int64_t first = item.kv.begin + item.key_begin;
    store_grad(p.dk, p.element, first, item_keys, p.kv_heads, kv_head, p.dim_qk, buffers.dk,
               buffers.qk_row);
    store_grad(p.dv, p.element, first, item_keys, p.kv_heads, kv_head, p.dim_v, buffers.dv,
               buffers.v_row);
  }
}
