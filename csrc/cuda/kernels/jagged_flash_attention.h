// The kernels of jagged_flash_attention, as host code sees them.
#pragma once

#include "contract/key_interval.h"
#include "contract/score_bias.h"
#include "cuda/kernels/prim/counts.cuh"
#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace jagged_cuda {

// Sequences of at most tiny_limit() queries and keys have kernels of their own (attention/route.cuh):
// of head dims above 64 a warp holds fewer rows.
constexpr int kTinyRows = 64, kTinyWideRows = 32;
template <typename Params>
constexpr int tiny_limit(const Params& params) {
  return params.dim_qk > 64 || params.dim_v > 64 ? kTinyWideRows : kTinyRows;
}
// Others of at most this many queries and keys have kernels of their own on compute capability 9.0,
// for head dims of 33 to 64 (attention/launch.h).
constexpr int kShortRows = 256;
// Head dims above 128.
template <typename Params>
constexpr bool is_wide(const Params& params) {
  return params.dim_qk > 128 || params.dim_v > 128;
}
// Sequences of more queries than this have a forward kernel of their own where
// AttentionParams::long_plan is given and the operands allow: shorter ones would leave most of its
// tiles empty. Wide heads have no other on compute capability 9.0, so it takes all that are not left
// to the kernels for tiny ones, and where those do not run the rows outside. With ranges and the like
// it leaves those of one tile of the general kernel. With the heads of a group packed into its tiles few
// queries of many keys are enough for it.
constexpr int kPackedRows = 32;  // of a tile
template <typename Params>
constexpr int long_rows(const Params& params) {
  if (is_wide(params)) return 0;
  if (params.silu || is_general(params)) return kTinyRows;
  if (params.type == ElementType::kTf32) return 2 * kTinyRows;
  if (params.packed_shift > 0) return kPackedRows >> params.packed_shift;
  return params.dim_qk > 64 || params.dim_v > 64 ? 192 : kShortRows;
}
// But with packed heads up to 64 dims those that are short in queries and keys are not among them.
template <typename Params>
constexpr bool spares_short(const Params& params) {
  return params.packed_shift > 0 && params.dim_qk <= 64 && params.dim_v <= 64;
}
template <typename Params>
constexpr bool is_long(const Params& params, int64_t queries, int64_t keys) {
  return queries > long_rows(params) &&
         !(spares_short(params) && queries <= kShortRows && keys <= kShortRows);
}

// A [rows, heads, dim] operand whose last dimension is contiguous; strides in elements.
struct HeadsView {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
};

// Which sequences the kernel for long ones takes, where there is a plan. The host finds it from the other
// parameters (planned_lengths()): a kernel would wait for each line of these that decide it.
struct PlannedLengths {
  int above;     // those of more queries,
  int spared;    // but for those of at most so many queries and keys;
  bool outside;  // and the rows outside all sequences
};

// Sums, LSE and its gradient are f32 (f64 for f64), contiguous. What the first instructions of a kernel
// read stands first: for each line of its parameters it waits.
struct AttentionParams {
  ElementType type;
  OffsetsView q_offsets;   // [B + 1], rows of q
  OffsetsView kv_offsets;  // [B + 1], rows of k and v; a copy of q_offsets in self-attention
  // [long_plan_bytes(B)], aligned to 16: workspace of the kernel for long sequences; twice as much in
  // the backward pass of wide heads. Null if there are none, or no such kernel.
  void* long_plan;
  PlannedLengths planned;
  // True where each CTA of that kernel finds out for itself what is in the plan, which nobody writes.
  bool plans_itself;
  // True where the plan is complete as soon as that kernel starts: the one before it has waited for it.
  bool plan_is_there;
  // True where a kernel for longer sequences runs behind one for tiny ones, each on its own. The
  // rows outside all sequences are the latter's.
  bool split_by_length;
  // True where the former looks for its tiles in slabs of tiny_limit() rows, whose number does not grow
  // with that of sequences; self-attention only.
  bool longer_in_slabs;
  // True where a kernel for short sequences takes those that are not tiny.
  bool short_apart;
  // True where sequences are short on average: then the kernel for long ones first looks whether any is.
  bool looks_for_long;
  int packed_shift;  // tiles of the kernel for long ones hold 2^packed_shift heads of each query (packing_shift())
  int heads;     // H
  int kv_heads;  // G, divides H
  int dim_qk;    // D
  int dim_v;     // Dv
  // [kLongerWords]: the kernel for tiny sequences leaves call_number here, where it finds a sequence of
  // more than tiny_limit() rows, and one of more than kShortRows. Where it has not, those behind it that
  // look for tiles in slabs have nothing to look for. Before, the words may hold anything: if that
  // number, they look in vain. Null: they always look.
  int* longer;
  // At no multiple of 16 bytes: both in one load cost backward_items.cuh registers (test_sass.py).
  int64_t window_left;  // rows, at least 0; kUnbounded for all
  int64_t window_right;
  int call_number;
  HeadsView q;    // [Tq, H, D]
  HeadsView k;    // [Tk, G, D]
  HeadsView v;    // [Tk, G, Dv]
  HeadsView out;  // [Tq, H, Dv] contiguous: written forward, read backward
  void* lse;      // [Tq, H]: written forward, read backward
  double scale;
  const KeyInterval* key_ranges;  // [Tq, num_key_ranges], contiguous; may be null: all keys
  int num_key_ranges;             // 1 or 2
  // silu(score) in place of a probability (jagged_hstu_attention): no lse is read or written.
  bool silu;
  double divisor;         // of silu: of its sums; 0: the number of keys
  const void* row_scale;  // [Tq], of silu: a factor for each row, of the type of sums; may be null
  CountsView kv_lengths;  // [B]: the used part of each key sequence; data may be null: all
  ScoreBias bias;         // added to scores, after scale
  int64_t max_len;        // rows of the longest sequence, as the caller says; 0 if it says nothing
  // True if rows of q, k, v (and of the gradients) start at 16-byte boundaries and D and Dv are
  // multiples of 16 bytes.
  bool aligned;
  bool mma_sync_only;  // JAGGED_CUDA_TENSOR_CORES=mma_sync
  // True where the kernel for long sequences comes before those for other lengths, since most rows are
  // likely its own.
  bool long_first;

  static constexpr int64_t kUnbounded = int64_t{1} << 40;
  static constexpr int kLongerWords = 2;
};

// Whether a call wants the kernels that look ranges of keys, biases and used parts up.
constexpr bool is_general(const AttentionParams& params) {
  return params.key_ranges != nullptr || params.kv_lengths.data != nullptr || params.bias.any();
}

// How many heads of a group the forward kernel for long sequences packs into a tile, as a logarithm:
// then K and V are read once for all of them, and a few queries fill a tile.
constexpr int packing_shift(const AttentionParams& params) {
  if (is_wide(params) || params.silu || is_general(params)) return 0;
  const int group = params.heads / params.kv_heads;
  return group % 8 == 0 ? 3 : group % 4 == 0 ? 2 : group % 2 == 0 ? 1 : 0;
}

constexpr int64_t long_plan_bytes(int64_t num_seqs) { return (num_seqs + 3) * 16; }

struct AttentionBackwardParams : AttentionParams {
  static constexpr int kItemCounts = 2;
  HeadsView grad_out;    // [Tq, H, Dv]
  const void* grad_lse;  // [Tq, H], may be null
  // [Tq, H]: workspace, sum of grad_out * out over Dv, less grad_lse; of silu: row_weight(). Behind it
  // there may be `longer` and `next_item`.
  void* delta;
  // [kItemCounts]: workspace of the kernels whose warpgroups take items; null where there is none.
  int* next_item;
  HeadsView grad_q;  // [Tq, H, D] contiguous
  HeadsView grad_k;  // [Tk, G, D] contiguous
  HeadsView grad_v;  // [Tk, G, Dv] contiguous
  void* key_sums;    // [Tk, H], full of zeros: gets the sum of dS of each key; may be null
  // Gets the gradients of tables where table_ctas is not 0, to be added up: [table_ctas *
  // table_parts(type), H, buckets] each; of f32 and f64 full of zeros.
  void* time_sums;
  void* position_sums;
  int table_ctas;  // of each head
  // [tile_bounds_bytes(Tq, B)], aligned to 16: workspace of the wgmma kernels that take ranges of
  // keys and silu; null if they cannot.
  void* tile_bounds;
  // Workspace of the kernel for long sequences, beside long_plan; null as that, and for wide heads.
  float* long_statistics;  // [long_statistics_floats]
  float* long_grad_q;      // [long_grad_q_floats]
  // [num_long_tickets]; null: all tiles of keys add to sums that a kernel before them clears.
  int* long_tickets;
  bool long_in_order;  // tiles add in order; else the first stores, and the others add to that
  // The kernel for dk and dv of other sequences is behind those for long ones: delta is there.
  bool dkdv_is_last;
};

// What each tile of 64 queries sees (attention/visible.cuh).
constexpr int kTileBoundsBytes = 32;
inline int64_t tile_bounds_bytes(int64_t queries, int64_t num_seqs) {
  return num_tiles(queries, num_seqs, 64) * kTileBoundsBytes;
}

// What a CTA that sums the gradients of tables leaves behind: one sum of each bucket, or, of f32 and
// f64, each of its warps one.
constexpr int kTableWarps = 8;
inline int table_parts(ElementType type) { return is_16_bit(type) ? 1 : kTableWarps; }
// How many CTAs per head do so: by sizes alone, so that sums have one order.
inline int64_t table_ctas(const AttentionParams& params) {
  // Several times as many as run at once, since tiles differ; f32 and f64 leave more behind.
  const int64_t ctas = is_16_bit(params.type) ? 2112 : 528;
  const int64_t wanted = ctas / (params.heads > ctas ? ctas : params.heads > 0 ? params.heads : 1);
  const int64_t tiles = num_tiles(params.q_offsets.total, params.q_offsets.num_seqs, 64);
  return wanted < tiles ? wanted : tiles;
}

constexpr bool is_narrow_backward(const AttentionBackwardParams& params) {
  return params.dim_qk <= 64 && params.dim_v <= 64;
}

// Whether the first tile of keys of each sequence is seen by all queries, so that its part of dq can be
// stored, and the others' added to that.
constexpr bool first_tile_may_store(const AttentionBackwardParams& params) {
  return params.q_offsets.data == params.kv_offsets.data &&
         params.window_left >= AttentionParams::kUnbounded;
}

// The backward kernel for long sequences takes those of more queries than this: shorter ones end
// before its pipeline has filled, and the sums of dq cost a kernel before it and one behind it. Where
// all queries see all keys half as many are enough, if there are tiles of keys for all SMs.
constexpr int kLongBackwardRows = 1023, kLongUnmaskedRows = 511;
constexpr int long_rows(const AttentionBackwardParams& params) {
  if (is_wide(params)) return 0;
  constexpr int64_t kEnoughRows = 1 << 16;  // of all kv heads
  const bool sees_all =
      first_tile_may_store(params) && params.window_right >= AttentionParams::kUnbounded;
  return sees_all && !params.long_in_order &&
                 params.kv_offsets.total * params.kv_heads >= kEnoughRows
             ? kLongUnmaskedRows
             : kLongBackwardRows;
}

// `planned` from the other parameters, split_by_length among them: found where a plan is launched, and in
// the backward pass, whose other kernels may come before that, at its begin, too.
template <typename Params>
PlannedLengths planned_lengths(const Params& params) {
  constexpr bool kOfKeys = std::is_base_of_v<AttentionBackwardParams, Params>;
  const int above = long_rows(params), tiny = params.split_by_length ? tiny_limit(params) : 0;
  const bool takes_all = above == 0, outside = (takes_all && !params.split_by_length) ||
                                               (!kOfKeys && (params.silu || is_general(params)));
  // Tiles of keys are planned where there are no queries, too.
  return {takes_all && kOfKeys ? -1 : above, spares_short(params) ? kShortRows : tiny, outside};
}

// Workspace for the queries of long sequences, in whole units: of sequence `seq`, which begins at row
// `begin`, from long_unit() on. A sequence needs up to one unit more than its rows fill. It has that by
// its number; or by its rows, of which there are at least so many, where that takes less memory.
template <int kUnit>
constexpr int64_t long_unit(const AttentionBackwardParams& params, int64_t begin, int64_t seq) {
  constexpr int64_t kMany = kLongBackwardRows + 1, kFewer = kLongUnmaskedRows + 1;
  const bool fewer = long_rows(params) == kLongUnmaskedRows;
  if (params.q_offsets.num_seqs * (fewer ? kFewer : kMany) < params.q_offsets.total)
    return begin / kUnit + seq;
  return fewer ? begin * (kFewer + kUnit) / (kFewer * kUnit)
               : begin * (kMany + kUnit) / (kMany * kUnit);
}
// Queries of a step, at head dims up to 64 and up to 128.
constexpr int kLongNarrowStep = 128, kLongStep = 64;
constexpr int64_t long_steps(const AttentionBackwardParams& params) {
  const int64_t rows = params.q_offsets.total, seqs = params.q_offsets.num_seqs;
  return (is_narrow_backward(params) ? long_unit<kLongNarrowStep>(params, rows, seqs)
                                     : long_unit<kLongStep>(params, rows, seqs)) +
         2;
}
// For each step and head lse and delta,
constexpr int64_t long_statistics_floats(const AttentionBackwardParams& params) {
  return long_steps(params) * params.heads * 2 *
         (is_narrow_backward(params) ? kLongNarrowStep : kLongStep);
}
// the sums of dq,
constexpr int64_t long_grad_q_floats(const AttentionBackwardParams& params) {
  return long_steps(params) * params.heads * kLongNarrowStep * kLongStep;
}
// and of each half of these, how many tiles of keys are in it. (Without an order the first of a sequence
// and kv head counts the warps that have stored the first tile's.)
constexpr int64_t num_long_tickets(const AttentionBackwardParams& params) {
  return long_steps(params) * params.heads * 2;
}

// Whether tiles of keys add in order though nobody asks for it: with a causal mask and few sequences and
// heads, where above 64 dims that is faster, since no sums are cleared or rounded (docs/performance_log.md).
inline bool adds_in_order(const AttentionBackwardParams& params) {
  constexpr int64_t kFew = 128;
  const int64_t num_seqs = params.q_offsets.num_seqs,
                most_long = params.q_offsets.total / (kLongBackwardRows + 1);
  return !is_narrow_backward(params) && first_tile_may_store(params) &&
         params.window_right < AttentionParams::kUnbounded &&
         (num_seqs < most_long ? num_seqs : most_long) * params.kv_heads < kFew;
}

// Whether the backward kernel for long sequences takes these operands, if it gets its workspace.
bool takes_long_backward(const AttentionBackwardParams& params);

// Whether the forward kernel for long sequences takes these operands in TF32, if it gets its plan.
bool takes_tf32_long(const AttentionParams& params);

// Whether the forward kernel for long sequences takes these operands with ranges of keys, used
// parts, kv_bias or silu, if it gets its plan.
bool takes_ranged_forward(const AttentionParams& params);

// Whether the wgmma backward kernels for ranges of keys, unused keys, kv_bias and silu take these
// operands, if they get their workspace.
bool takes_ranged_backward(const AttentionBackwardParams& params);

cudaError_t launch_jagged_flash_attention(const AttentionParams& params, cudaStream_t stream);
cudaError_t launch_jagged_flash_attention_backward(const AttentionBackwardParams& params,
                                                   cudaStream_t stream);

}  // namespace jagged_cuda
