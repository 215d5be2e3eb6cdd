// Forward of jagged_flash_attention for tiny sequences of head dims of 65 to 256: at most
// kTinyWideRows queries and keys, 16-bit elements, on mma.sync (compute capability 8.0 and later).
//
// The mathematics, the grid and the layout of fragments are those of tiny_forward.cuh, but columns
// come and go kGroup blocks of 32 at a time, since the registers of a warp do not hold whole rows:
//     for each 16 queries:
//       for each group of columns:  load Q and K, S += Q K^T       (the first group of V beside it)
//       P = softmax of S
//       for each group of columns:  load V, write (P V) / l
// K and V of the second 16 queries come from L1 or L2.
#pragma once

#include "cuda/kernels/attention/tiny_forward.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct TinyWideForwardConfig {
  using Element = Element_;
  static constexpr int kHeads = 1;
  static constexpr int kDim = kDim_;  // D and Dv, rounded up
  static constexpr int kWarps = 2;
  static constexpr int kThreads = kWarps * 32;
  // Twice as many warps per SM. With 256 columns and 168 registers it would spill.
  static constexpr int kMinCtas = kDim == 256 ? 4 : 6;
  // Of a group: Q, K and V of 32 keys fill 160 registers.
  static constexpr int kGroup = kDim == 96 ? 3 : kDim == 192 ? 2 : 4, kGroups = kDim / 32 / kGroup;
  static constexpr PathName kName = PathName("cuda.attention.forward.tiny.d") + kDim;
  static_assert(kDim == 96 || kDim == 128 || kDim == 192 || kDim == 256);
};

// What TinyScores and store_row know of a group of columns.
template <typename Config>
struct TinyWideGroup {
  using Element = typename Config::Element;
  static constexpr int kColumnBlocks = Config::kGroup, kColumns = kColumnBlocks * 32,
                       kBytes = kColumns * 2;
};

// The same rows, `columns` further.
__device__ __forceinline__ LaneRows at_column(const LaneRows& g, int columns) {
  LaneRows moved = g;
  moved.data += columns * 2;
  return moved;
}

// Queries of one head from begin to end, of all blocks of 16, where the keys fill kKeyBlocks of them.
template <typename Config, int kKeyBlocks>
__device__ __forceinline__ void attend_wide(const AttentionParams& params,
                                            const TinySequence& sequence, unsigned head, int begin,
                                            int end, int lane) {
  using Element = typename Config::Element;
  using Group = TinyWideGroup<Config>;
  constexpr int kColumnBlocks = Group::kColumnBlocks, kColumns = Group::kColumns;
  const unsigned kv_head = params.heads == params.kv_heads
                               ? head
                               : head / static_cast<unsigned>(params.heads / params.kv_heads);
  const int queries = sequence.queries.len, keys = sequence.keys.len;
  // This lane's place in rows of Q, K and the output, and in pairs of rows of V.
  const int row = lane / 4, column = lane % 4 * 8, pair_row = lane % 4 * 2,
            pair_column = lane / 4 * 4;
  const LaneRows gK(params.k, sequence.keys.begin + row, kv_head, column),
      gV(params.v, sequence.keys.begin + pair_row, kv_head, pair_column);
  // At least a tiny positive number: with scale 0 all scores are equal, but a masked one, -inf, must
  // stay so.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  const TinyWindow window(params, queries, keys);
#pragma unroll 1
  for (int query = begin; query < end; query += 16) {
    const unsigned first = sequence.queries.begin + query + row;
    const LaneRows gQ(params.q, first, head, column), gOut(params.out, first, head, column);
    PairFragments<kColumnBlocks> v[kKeyBlocks];
    const auto load_values = [&](int group) {
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block)
        v[block].load(at_column(gV, group * kColumns), block * 16, keys - pair_row,
                      params.dim_v - pair_column - group * kColumns);
    };
    TinyScores<Group, kKeyBlocks> scores;
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) {
      RowFragments<kColumnBlocks> q, k[kKeyBlocks];
      const int columns = params.dim_qk - column - group * kColumns;
      q.load(at_column(gQ, group * kColumns), 0, queries - query - row, columns);
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block)
        k[block].load(at_column(gK, group * kColumns), block * 16, keys - row, columns);
      if (group == Config::kGroups - 1) load_values(0);
      scores.add_product(q, k);
    }
    if (scale < 0.0f) scores.negate();  // the maximum of scale * S lies where -S is largest
    if (window.cuts()) {
      scores.mask_window(window, query + row, keys, lane);
    } else {
      scores.mask_end(keys, lane);
    }
    scores.softmax(scale_log2);
    float inverse_sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = scores.row_sum[half];
      inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && query + row + 8 * half < queries) {
        static_cast<float*>(
            params.lse)[static_cast<uint64_t>(first + 8 * half) * params.heads + head] =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(scores.row_max[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) {
      if (group > 0) load_values(group);
      float o[kColumnBlocks * 4][4] = {};
      scores.multiply(o, v);
      const LaneRows g = at_column(gOut, group * kColumns);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (query + row + 8 * half >= queries) continue;
        store_row<Element, kColumnBlocks>(o, half, inverse_sum[half], g.row(half * 8),
                                          params.dim_v - column - group * kColumns);
      }
    }
  }
}

// attend_tiny() for wide rows.
template <typename Config>
__device__ __forceinline__ void attend_tiny_wide(const AttentionParams& params, unsigned seq,
                                                 unsigned head, int begin, int blocks, int lane) {
  const TinySequence sequence = tiny_sequence(params, seq);
  const int end = min(sequence.queries.len, begin + 16 * blocks);
  if (begin >= end) return;
  static_assert(kTinyWideRows == 32);
  switch ((sequence.keys.len + 15) / 16) {
    case 0:
      return begin == 0 ? attend_to_nothing(params, sequence, head, lane) : void();
    case 1:
      return attend_wide<Config, 1>(params, sequence, head, begin, end, lane);
    case 2:
      return attend_wide<Config, 2>(params, sequence, head, begin, end, lane);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_tiny_wide(
    const __grid_constant__ AttentionParams params) {
  const unsigned heads = params.heads, item_ctas = TinyItem::ctas(params, heads, Config::kWarps);
  if (params.plan_is_there && blockIdx.x == item_ctas) ptx::griddepcontrol_wait();  // for the plan
  ptx::griddepcontrol_launch_dependents();                                          // launch_longer
  if (blockIdx.x >= item_ctas) {
    const unsigned cta = blockIdx.x - item_ctas;
    fill_outside(params.q_offsets, params.out.data, heads * params.dim_v / 2, 0.0f, cta);
    fill_outside(params.q_offsets, params.lse, heads, -INFINITY, cta);
    if (cta == 0) ptx::griddepcontrol_wait();  // launch_behind
    return;
  }
  const TinyItem item(heads, Config::kWarps);
  if (item.seq >= params.q_offsets.num_seqs) return;
  attend_tiny_wide<Config>(params, item.seq, item.head, 0, kTinyWideRows / 16, threadIdx.x % 32);
}

template <typename Element>
cudaError_t launch_forward_tiny_wide(const AttentionParams& params, cudaStream_t stream) {
  const auto launch_dim = [&](auto dim) {
    using Config = TinyWideForwardConfig<Element, dim.value>;
    return launch_tiny_forward<forward_tiny_wide<Config>, Config>(params, stream);
  };
  if (fits_96(params)) return launch_dim(Constant<96>{});
  if (!is_wide(params)) return launch_dim(Constant<128>{});
  return params.dim_qk <= 192 && params.dim_v <= 192 ? launch_dim(Constant<192>{})
                                                     : launch_dim(Constant<256>{});
}

}  // namespace jagged_cuda::attention
