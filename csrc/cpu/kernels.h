// The arguments of the compute kernels, which the operators (jagged_*.cpp) pass, and the table of
// kernels.
//
// The kernels are in kernels/*.inl and simd/*.inl, free of torch headers. They are compiled once
// per instruction set (isa_baseline.cpp, isa_avx2.cpp, isa_avx512.cpp), each in a namespace of its
// own under a target pragma, so that one binary serves every machine; dispatch.cpp picks a table at
// run time. A kernel is a template over its accumulator (float, or double for float64); the element
// type of tensors is a run-time value, since only the loading and storing of rows depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "contract/activation.h"
#include "contract/dropout.h"
#include "contract/score_bias.h"

namespace jagged_cuda::cpu {

enum class Element : int { kFloat, kDouble, kHalf, kBFloat16 };

inline int64_t element_bytes(Element element) {
  return element == Element::kDouble ? 8 : element == Element::kFloat ? 4 : 2;
}

// A view of a tensor's rows: the last dimension contiguous, strides in elements.
struct Rows {
  const void* data;
  int64_t row_stride;
  int64_t head_stride;  // 0 without heads
};

// Rows [begin, begin + len) of a jagged tensor.
struct Sequence {
  int64_t begin;
  int64_t len;
};

// Elements between rows of a scratch matrix: whole cache lines, an odd number of them, so that a
// column of rows spreads over all sets of the cache.
constexpr int64_t padded_row(int64_t columns) { return ((columns + 15) / 16 | 1) * 16; }

// Hands out pieces of one block of memory, aligned to cache lines. With a null base it only counts:
// the same initialisers of a buffer struct that lay the scratch memory out tell its size.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  size_t used_bytes() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// The bytes that Buffers{arena, params} lays out.
template <class Buffers, class Params>
size_t scratch_bytes(const Params& params) {
  Arena arena(nullptr);
  Buffers counted{arena, params};
  return arena.used_bytes();
}

// The same for the accumulators of an element type.
template <template <class> class Buffers, class Params>
size_t scratch_bytes(Element element, const Params& params) {
  return element == Element::kDouble ? scratch_bytes<Buffers<double>>(params)
                                     : scratch_bytes<Buffers<float>>(params);
}

// ---- jagged_dense_bmm: out rows = x rows times y of their sequence

struct DenseBmmParams {
  Element element;
  const void* x;         // [T, inner]
  int64_t x_row_stride;  // its last dimension is contiguous
  const void* y;         // [B, inner, columns]; y_row_stride or y_column_stride is 1
  int64_t y_seq_stride, y_row_stride, y_column_stride;
  void* out;  // [T, columns], contiguous
  int64_t inner, columns;
  const void* bias = nullptr;  // [B, columns] or null
  int64_t bias_stride = 0;     // elements between rows of bias
  Activation activation = Activation::kNone;
};

struct DenseBmmItem {
  int64_t seq;
  int64_t begin, rows;  // rows of x and out, in the whole tensor
};

// The product is blocked over rows (an item), columns and depth.
constexpr int64_t kDenseRows = 192, kDenseColumns = 512, kDenseDepth = 256;

template <class T>
struct DenseBmmBuffers {
  Arena& arena;
  const DenseBmmParams& params;
  int64_t depth = params.inner < kDenseDepth ? params.inner : kDenseDepth;
  int64_t columns = params.columns < kDenseColumns ? params.columns : kDenseColumns;
  int64_t x_row = padded_row(depth), y_row = padded_row(columns);
  T* x = arena.take<T>(kDenseRows * x_row);    // converted x
  T* y = arena.take<T>((depth + 3) * y_row);   // packed y, written up to a multiple of 4 rows
  T* out = arena.take<T>(kDenseRows * y_row);  // [kDenseRows, y_row]
  T* bias = arena.take<T>(y_row);
};

// ---- jagged_jagged_bmm: out = x^T y, summed over rows of a sequence

struct JaggedBmmParams {
  Element element;
  const void* x;  // [T, x_columns]
  const void* y;  // [T, y_columns]
  int64_t x_row_stride, y_row_stride;
  int64_t x_columns, y_columns;
};

struct JaggedBmmItem {
  int64_t begin, rows;  // of x and y, in the whole tensor
  int64_t x_begin, x_end, y_begin, y_end;
  void* out;          // [x_columns, y_columns], contiguous
  bool out_is_accum;  // out holds accumulators (a partial sum), else elements
};

// Rows that are summed at a time: fewer if an operand has few columns, since both are then read
// from the tensors.
constexpr int64_t kJaggedDepth = 128, kJaggedDepthFew = 32;
constexpr int64_t kJaggedCompactRow = 96;  // longer rows are copied ahead of repeated use
constexpr int64_t kJaggedNarrow = 64, kJaggedWide = 256;

template <class T>
struct JaggedBmmBuffers {
  Arena& arena;
  const JaggedBmmParams& params;
  // Rows of the operand with fewer columns, of the other one, and their product.
  T* narrow = arena.take<T>(kJaggedDepth * padded_row(kJaggedNarrow));
  T* wide = arena.take<T>(kJaggedDepth * padded_row(kJaggedWide));
  T* out = arena.take<T>(kJaggedNarrow * padded_row(kJaggedWide));
};

// ---- jagged_softmax over rows, each column alone

struct SoftmaxParams {
  Element element;
  bool backward;
  const void* x;  // [T, columns]; backward: the forward's result
  int64_t x_row_stride;
  const void* grad_out;  // [T, columns], backward only
  int64_t grad_row_stride;
  void* out;  // [T, columns], contiguous; backward: grad_in
  int64_t columns;
  double scale;
};

struct SoftmaxItem {
  int64_t begin, rows;
  int64_t column_begin, columns;  // at most kSoftmaxColumns
};

// Lines of `len` elements one after another, with a softmax each.
struct SoftmaxLinesItem {
  int64_t begin, lines, len;
};

constexpr int64_t kSoftmaxColumns = 128;
// Elements that are read at a time; a sequence of at most so many is read once.
constexpr int64_t kSoftmaxBlock = 32768;

// Statistics, forward: the maximum of scale * x and the sum of exp(scale * x - maximum); backward:
// the sum of grad_out * out (no maximum).
template <class T>
struct SoftmaxBuffers {
  static constexpr int64_t kMaxLanes =
      kSoftmaxColumns * 16;  // of a super row (kernels/softmax.inl)
  static_assert(kMaxLanes <= kSoftmaxBlock);

  Arena& arena;
  const SoftmaxParams& params;
  T* x = arena.take<T>(kSoftmaxBlock);  // x, then results
  T* max = arena.take<T>(kMaxLanes);
  T* sum = arena.take<T>(kMaxLanes);
  T* lane_max = arena.take<T>(kMaxLanes);
  T* column_max = arena.take<T>(kSoftmaxColumns);
  T* column_sum = arena.take<T>(kSoftmaxColumns);
  T* grad = params.backward ? arena.take<T>(kSoftmaxBlock) : nullptr;  // grad_out
};

// ---- jagged_sum and jagged_mean over rows, each column alone

struct SumParams {
  Element element;
  const void* x;  // [T, columns]
  int64_t x_row_stride;
  int64_t columns;
};

struct SumItem {
  int64_t begin, rows;            // at most kSumRows
  int64_t column_begin, columns;  // at most kSumColumns
};

// Sums of so many rows are exact enough, and a part of so many is worth a thread.
constexpr int64_t kSumRows = 1024;
constexpr int64_t kSumColumns = 1024, kSumLanes = 64;

template <class T>
struct SumBuffers {
  Arena& arena;
  const SumParams& params;
  T* sums = arena.take<T>(kSumColumns);
  T* row = arena.take<T>(kSumColumns);
};

// ---- jagged_dense_add and jagged_dense_mul, element by element

enum class Combine : int { kAdd, kMultiply };

// ---- jagged_flash_attention

// Keys [begin, gap_begin) and [gap_end, end), in this order; either may be empty.
struct RowKeys {
  int64_t begin, gap_begin, gap_end, end;

  bool empty() const { return begin >= gap_begin && gap_end >= end; }
  bool has_gap() const { return gap_begin < gap_end && gap_end < end; }
  // The same, counted from another key on.
  RowKeys counted_from(int64_t key) const {
    return {begin - key, gap_begin - key, gap_end - key, end - key};
  }
  int64_t count_within(int64_t first, int64_t last) const {
    return count(begin, gap_begin, first, last) + count(gap_end, end, first, last);
  }

 private:
  static int64_t count(int64_t from, int64_t to, int64_t first, int64_t last) {
    from = from > first ? from : first;
    to = to < last ? to : last;
    return to > from ? to - from : 0;
  }
};

// The keys that a query row of a sequence sees: those within its window, [begin(row), end(row)),
// both growing with row, and of these those in its ranges.
struct VisibleKeys {
  int64_t shift;  // Lk - Lq
  int64_t kv_len;
  int64_t window_left, window_right;  // -1: unbounded
  const int32_t* ranges;              // [Lq, num_ranges, 2], or null: all keys
  int64_t num_ranges;                 // 1 or 2

  RowKeys of(int64_t row) const {
    const int64_t first = begin(row), last = end(row);
    if (ranges == nullptr) return {first, last, last, last};
    const int32_t* bounds = ranges + row * num_ranges * 2;
    RowKeys keys{bounds[0] > first ? bounds[0] : first, bounds[1] < last ? bounds[1] : last, last,
                 last};
    if (num_ranges == 1) return keys;
    keys.gap_end = bounds[2] > first ? bounds[2] : first;
    keys.end = bounds[3] < last ? bounds[3] : last;
    if (keys.gap_end >= keys.end) return {keys.begin, keys.gap_begin, last, last};
    if (keys.begin >= keys.gap_begin) return {keys.gap_end, keys.end, last, last};
    if (keys.gap_end < keys.begin) {
      keys = {keys.gap_end, keys.end, keys.begin, keys.gap_begin};
    }
    if (keys.gap_end > keys.gap_begin) return keys;
    // Without a gap they are one.
    return {keys.begin, keys.end > keys.gap_begin ? keys.end : keys.gap_begin, last, last};
  }

  int64_t begin(int64_t row) const {
    const int64_t first = row + shift - window_left;
    return window_left < 0 || first < 0 ? 0 : first < kv_len ? first : kv_len;
  }
  int64_t end(int64_t row) const {
    const int64_t last = row + shift + window_right + 1;
    return window_right < 0 || last > kv_len ? kv_len : last > 0 ? last : 0;
  }
};

struct AttentionParams {
  Element element;
  Rows q, k, v;  // [Tq, heads, dim_qk], [Tk, kv_heads, dim_qk], [Tk, kv_heads, dim_v]
  void* out;     // [Tq, heads, dim_v], contiguous
  void* lse;     // [Tq, heads], contiguous accumulators
  int64_t heads, kv_heads, dim_qk, dim_v;
  int64_t window_left, window_right;
  const int32_t* key_ranges;  // [Tq, num_key_ranges, 2], contiguous, or null
  int64_t num_key_ranges;
  double scale;
  bool silu;              // in place of softmax: there is no lse then, nor out_rows
  double divisor;         // of silu; 0: the number of keys
  const void* row_scale;  // [Tq] accumulators, of silu; or null
  ScoreBias bias;
  // Backward only.
  Rows out_rows, grad_out;  // [Tq, heads, dim_v]
  const void* grad_lse;     // [Tq, heads], contiguous accumulators, or null
  void *dq, *dk, *dv;       // like q, k and v, contiguous
  void* key_sums;           // [Tk, heads] accumulators: sums of dS over queries; or null

  VisibleKeys visible_keys(const Sequence& queries, const Sequence& keys) const {
    const int32_t* ranges =
        key_ranges == nullptr ? nullptr : key_ranges + queries.begin * num_key_ranges * 2;
    return {keys.len - queries.len, keys.len, window_left, window_right, ranges, num_key_ranges};
  }

  // What the sum of a row's silu(scores) v is multiplied by.
  template <class T>
  T row_weight(int64_t global_row, int64_t num_keys) const {
    const T factor = row_scale == nullptr ? T(1) : static_cast<const T*>(row_scale)[global_row];
    return factor / (divisor == 0 ? static_cast<T>(num_keys) : static_cast<T>(divisor));
  }
};

// Forward: query rows [row_begin, row_end) of one head. Backward: the part of the gradients of one
// key/value head (and its group of query heads) that query rows [row_begin, row_end) and keys
// [key_begin, key_end) give.
struct AttentionItem {
  Sequence q, kv;
  int64_t head;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;
  bool wants_dq, wants_dkv;
  // Sums of dS by bucket are added to these, [heads, buckets] accumulators each; or null.
  void *time_sums, *position_sums;
};

constexpr int64_t kQueryBlock = 48, kKeyBlock = 128;
constexpr int64_t kScoreRow = padded_row(kKeyBlock);

// Query rows of one forward item: as many as share one packing of keys and still fit into the L2
// cache.
inline int64_t attention_item_rows(const AttentionParams& params) {
  const int64_t dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  return kQueryBlock * (dim <= 64 ? 5 : dim <= 128 ? 3 : 2);
}

template <class T>
struct AttentionForwardBuffers {
  Arena& arena;
  const AttentionParams& params;
  int64_t qk_row = padded_row(params.dim_qk), v_row = padded_row(params.dim_v);
  int64_t rows = attention_item_rows(params);
  T* q = arena.take<T>(rows * qk_row);  // times scale
  T* k = arena.take<T>(kKeyBlock * qk_row);
  T* k_transposed = arena.take<T>(qk_row * kScoreRow);  // [dim_qk, kScoreRow]
  T* v = arena.take<T>(kKeyBlock * v_row);
  T* score = arena.take<T>(kQueryBlock * kScoreRow);  // logits, then probabilities
  T* out = arena.take<T>(rows * v_row);               // not yet divided by sum
  T* max = arena.take<T>(rows);
  T* sum = arena.take<T>(rows);
  T* rescale = arena.take<T>(kQueryBlock);  // exp(old max - new max)
};

// `max_rows` and `max_keys` bound the rows and keys of any item.
struct AttentionBackwardSize {
  const AttentionParams& params;
  int64_t max_rows, max_keys;
};

template <class T>
struct AttentionBackwardBuffers {
  Arena& arena;
  const AttentionBackwardSize& size;
  int64_t qk_row = padded_row(size.params.dim_qk), v_row = padded_row(size.params.dim_v);
  T* q = arena.take<T>(kQueryBlock * qk_row);  // times scale
  T* grad_out = arena.take<T>(kQueryBlock * v_row);
  T* out = arena.take<T>(kQueryBlock * v_row);
  T* k = arena.take<T>(kKeyBlock * qk_row);
  T* v = arena.take<T>(kKeyBlock * v_row);
  T* k_transposed = arena.take<T>(qk_row * kScoreRow);  // [dim, kScoreRow]
  T* v_transposed = arena.take<T>(v_row * kScoreRow);
  T* prob = arena.take<T>(kQueryBlock * kScoreRow);    // logits, then P
  T* dscore = arena.take<T>(kQueryBlock * kScoreRow);  // dP, then dS
  // Of one head.
  T* lse = arena.take<T>(size.max_rows);
  T* delta = arena.take<T>(size.max_rows);  // of silu: what a row is multiplied by
  T* dq = arena.take<T>(size.max_rows * qk_row);
  T* dk = arena.take<T>(size.max_keys * qk_row);
  T* dv = arena.take<T>(size.max_keys * v_row);
  T* key_sums = arena.take<T>(size.max_keys);
};

// ---- layer_norm_mul_dropout

struct LayerNormParams {
  Element element;
  const void *x, *u;  // [T, columns]
  int64_t x_row_stride, u_row_stride;
  const void *weight, *bias;  // [columns], contiguous accumulators
  int64_t columns;
  double eps;
  Dropout dropout;
  uint64_t seed;
  void* out;  // [T, columns], contiguous; forward only
  // Backward only.
  const void* grad_out;  // [T, columns]
  int64_t grad_row_stride;
  void *grad_x, *grad_u;  // [T, columns], contiguous
};

struct LayerNormItem {
  int64_t begin, rows;
};

// Rows whose sums for dweight and dbias one item keeps.
constexpr int64_t kLayerNormRows = 256;

template <class T>
struct LayerNormBuffers {
  Arena& arena;
  const LayerNormParams& params;
  int64_t row = padded_row(params.columns);
  T* x = arena.take<T>(row);  // then xhat
  T* u = arena.take<T>(row);
  T* keep = arena.take<T>(row);
  T* out = arena.take<T>(row);
  T* grad = params.grad_out != nullptr ? arena.take<T>(row) : nullptr;
};

// ---- The table

// Kernels of one accumulator type. Each works on one item, in scratch memory of its own (the
// Buffers above); items write disjoint parts of the result.
struct Kernels {
  void (*dense_bmm)(const DenseBmmParams&, const DenseBmmItem&, void* scratch);
  void (*jagged_bmm)(const JaggedBmmParams&, const JaggedBmmItem&, void* scratch);
  // Elements of `sums` [parts, count], accumulators, added over parts and stored to `out` [count].
  void (*sum_parts)(Element, void* out, void* sums, int64_t parts, int64_t count);
  // A whole sequence: statistics and results.
  void (*softmax)(const SoftmaxParams&, const SoftmaxItem&, void* scratch);
  // A part of a long sequence: statistics of its columns into max, sum [columns] (accumulators).
  void (*softmax_statistics)(const SoftmaxParams&, const SoftmaxItem&, void* max, void* sum,
                             void* scratch);
  // Statistics [parts, columns] of all parts combined into the first part's.
  void (*softmax_combine)(const SoftmaxParams&, void* max, void* sum, int64_t parts,
                          int64_t columns);
  // A part of a long sequence: results from the statistics of the sequence.
  void (*softmax_write)(const SoftmaxParams&, const SoftmaxItem&, const void* max, const void* sum,
                        void* scratch);
  // Lines of the tensors as vectors: statistics and results.
  void (*softmax_lines)(const SoftmaxParams&, const SoftmaxLinesItem&, void* scratch);
  // The sums of an item's columns to `sums` [columns] (accumulators), or, if that is null, over
  // `divisor` to `out` [columns].
  void (*sum_rows)(const SumParams&, const SumItem&, void* sums, void* out, double divisor,
                   void* scratch);
  // Sums [parts, columns] of all parts, added in order, over `divisor` to `out` [columns].
  void (*store_sums)(const SumParams&, void* sums, int64_t parts, int64_t columns, double divisor,
                     void* out);
  // x and y, `count` elements each, into `out`.
  void (*combine_elements)(Element, Combine, const void* x, const void* y, void* out,
                           int64_t count);
  void (*layer_norm)(const LayerNormParams&, const LayerNormItem&, void* scratch);
  // dx and du of the item's rows, and its part of dweight and dbias [columns], accumulators.
  void (*layer_norm_backward)(const LayerNormParams&, const LayerNormItem&, void* grad_weight,
                              void* grad_bias, void* scratch);
  void (*attention_forward)(const AttentionParams&, const AttentionItem&, void* scratch);
  void (*attention_backward)(const AttentionBackwardSize&, const AttentionItem&, void* scratch);
};

struct KernelTable {
  const char* name;  // for record_kernel
  Kernels float32;   // float accumulators: float32, float16, bfloat16
  Kernels float64;

  const Kernels& of(Element element) const {
    return element == Element::kDouble ? float64 : float32;
  }
};

// Null where the compiler or the architecture cannot build the set.
const KernelTable* baseline_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

// The table of the best instruction set of this machine, or of the one that the environment
// variable JAGGED_CUDA_CPU_ISA (baseline, avx2 or avx512) names; throws if the machine lacks that
// one. The variable is read at each call.
const KernelTable& kernel_table();

}  // namespace jagged_cuda::cpu
