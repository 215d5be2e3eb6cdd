// Forward of jagged_flash_attention for tiny sequences: at most kTinyRows queries and keys, head
// dims up to 64, 16-bit elements, on mma.sync (compute capability 8.0 and later).
//
// For 16 queries of one head against all keys of the sequence, c = |scale| log2(e):
//     S = Q K^T,  m = rowmax S,  P = exp2(c (S - m)),  l = rowsum P
//     out = P V / l,  lse = scale m + ln l
// Scores, sums and the output are f32; P is rounded to the element type for its product.
//
// Grid: one warp for each head of each sequence, or for two where most are shorter than a block, found by its offsets alone (TinyItem). The work is
// that of a copy, so the warp starts all its loads before it computes: K and V go straight from
// global memory to registers, in the order in which the products want them, and stay there while
// blocks of 16 queries pass, each loaded ahead. Nothing is shared between warps: no shared
// memory, no barrier. Bytes in flight per SM: 16 warps of head dim 32 with up to 12 KiB each.
//
// The products may sum over columns in any order, and the columns of V may take any place as long as
// those of the output take the same. So lane l reads 16 bytes of row l / 4 of Q and K at once
// (RowFragments), and the output of a lane is 16 consecutive bytes of its row (PairFragments).
//
// Without queries a warp leaves; without keys out is 0 and lse -inf. Rows past the end are zeros in
// registers, whatever lies there in memory; scores of keys past the end, or outside the window, are
// -inf. A sequence that is not tiny is skipped. The last CTAs write zeros and -inf to the rows
// outside all sequences.
#pragma once

#include "cuda/kernels/attention/tiny_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, int kHeads_ = 1, bool kMostShort_ = false>
struct TinyForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns in registers: D and Dv, rounded up
  // Of a sequence, that a warp takes: two where most have at most 16 rows (takes_pairs).
  static constexpr int kHeads = kHeads_;
  static constexpr bool kMostShort = kMostShort_;  // most have at most 16 rows
  // Few, since a CTA's slot is free only when the last of its warps is done.
  static constexpr int kWarps = 2;
  static constexpr int kThreads = kWarps * 32;
  // 16 warps per SM with 128 registers for 32 columns; 64 columns of 64 keys need 246. Where most are of
  // 16 rows, more: what is spilled for that is of more keys than most have.
  static constexpr int kMinCtas = kDim == 32    ? (kMostShort ? 12 : 8)
                                  : !kMostShort ? 4
                                  : kHeads == 2 ? 8
                                                : 6;
  static constexpr int kColumnBlocks = kDim / 32;
  static constexpr PathName kName =
      PathName("cuda.attention.forward.tiny.d") + kDim + (kHeads == 2 ? ".pairs" : "");
  static_assert((kDim == 32 || kDim == 64) && (kHeads == 1 || kMostShort));
};

// Whether sequences have at most 16 rows on average.
inline bool are_most_short(const AttentionParams& params) {
  return params.q_offsets.total <= params.q_offsets.num_seqs * 16 &&
         params.kv_offsets.total <= params.kv_offsets.num_seqs * 16;
}

// Whether a warp then takes two heads of a sequence. Their bits are the same.
inline bool takes_pairs(const AttentionParams& params) {
  return are_most_short(params) && params.heads == params.kv_heads && params.heads % 2 == 0;
}

// 16 rows of one head. Lane l holds, of rows l / 4 and l / 4 + 8, the chunk of 8 columns 8 (l % 4) of
// each 32: half of it is the lane's part of one product over 16 columns, half of the next.
template <int kColumnBlocks>
struct RowFragments {
  uint4 chunks[2][kColumnBlocks];

  // `g` is at row lane / 4 and column lane % 4 * 8; `rows` and `columns` are left from there.
  __device__ __forceinline__ void load(const LaneRows& g, int row, int rows, int columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* source = g.row(row + half * 8);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        chunks[half][block] = ptx::ld_global_nc_16(source + block * 64,
                                                   row + half * 8 < rows && block * 32 < columns);
      }
    }
  }
};

// 16 rows of one head as right operands of a product that sums over the rows: lane l holds rows 2
// (l % 4) + {0, 1, 8, 9} of columns 4 (l / 4) + {0, 1, 2, 3} of each 32. Column i of these four
// belongs to block i of 8 columns.
template <int kColumnBlocks>
struct PairFragments {
  uint2 pairs[kColumnBlocks][4];

  // `g` is at row lane % 4 * 2 and column lane / 4 * 4; `rows` and `columns` are left from there.
  __device__ __forceinline__ void load(const LaneRows& g, int row, int rows, int columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = row + i / 2 * 8 + i % 2;
      const char* source = g.row(step);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        pairs[block][i] =
            ptx::ld_global_nc_8(source + block * 64, step < rows && block * 32 < columns);
      }
    }
  }
  // The operand of 8 columns and rows 8 * half + [0, 8).
  __device__ __forceinline__ uint32_t operand(int block, int half) const {
    const uint2 low = pairs[block / 4][2 * half], high = pairs[block / 4][2 * half + 1];
    return block % 4 < 2 ? __byte_perm(low.x, high.x, block % 2 == 0 ? 0x5410 : 0x7632)
                         : __byte_perm(low.y, high.y, block % 2 == 0 ? 0x5410 : 0x7632);
  }
};

// One block of 16 queries against all keys. Lane l holds rows l / 4 and l / 4 + 8, of each 8 keys
// those 2 (l % 4) + {0, 1}.
template <typename Config, int kKeyBlocks>
struct TinyScores {
  using Element = typename Config::Element;
  static constexpr int kColumnBlocks = Config::kColumnBlocks;
  static constexpr int kKeys = kKeyBlocks * 16;

  float s[2 * kKeyBlocks][4] = {};  // [8 keys][2 * row + key]
  float row_max[2];
  float row_sum[2];

  __device__ __forceinline__ void add_product(const RowFragments<kColumnBlocks>& q,
                                              const RowFragments<kColumnBlocks> (&k)[kKeyBlocks]) {
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
      const uint4 low = q.chunks[0][block], high = q.chunks[1][block];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y},
                     second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 2 * kKeyBlocks; ++i) {
        const uint4 keys = k[i / 2].chunks[i % 2][block];
        ptx::mma_m16n8k16<Element>(s[i], first, keys.x, keys.y);
        ptx::mma_m16n8k16<Element>(s[i], second, keys.z, keys.w);
      }
    }
  }

  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int i = 0; i < kKeyBlocks * 8; ++i) s[i / 4][i % 4] = -s[i / 4][i % 4];
  }

  // Only the last 16 keys can lie past the end.
  __device__ __forceinline__ void mask_end(int keys, int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int block = 2 * kKeyBlocks - 2 + i / 4;
      if (block * 8 + lane % 4 * 2 + i % 2 >= keys) s[block][i % 4] = -INFINITY;
    }
  }

  // `row` is the lane's first.
  __device__ __forceinline__ void mask_window(const TinyWindow& window, int row, int keys,
                                              int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleColumns visible(window, row + 8 * half, 0, kKeys, keys);
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) {
        if (!visible.contains(i / 2 * 8 + lane % 4 * 2 + i % 2))
          s[i / 2][2 * half + i % 2] = -INFINITY;
      }
    }
  }

  // Scores become probabilities, times row_sum.
  __device__ __forceinline__ void softmax(float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) largest = fmaxf(largest, s[i / 2][2 * half + i % 2]);
      row_max[half] = quad_max(largest);
      // A row that sees nothing: -inf - -inf would be NaN.
      const float shift = row_max[half] == -INFINITY ? 0.0f : row_max[half] * scale_log2;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) {
        float& score = s[i / 2][2 * half + i % 2];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, -shift));
        sum += score;
      }
      row_sum[half] = quad_sum(sum);
    }
  }

  __device__ __forceinline__ void multiply(float (&o)[kColumnBlocks * 4][4],
                                           const PairFragments<kColumnBlocks> (&v)[kKeyBlocks]) {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = s[2 * block + i / 2];
        p[i] = pack<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int column = 0; column < kColumnBlocks * 4; ++column) {
        ptx::mma_m16n8k16<Element>(o[column], p, v[block].operand(column, 0),
                                   v[block].operand(column, 1));
      }
    }
  }
};

// The lane's part of row `half` of an output of 16 rows, times `scale`: 16 bytes of each 32 columns.
template <typename Element, int kColumnBlocks>
__device__ __forceinline__ void store_row(const float (&o)[kColumnBlocks * 4][4], int half,
                                          float scale, char* g, int columns) {
#pragma unroll
  for (int block = 0; block < kColumnBlocks; ++block) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = block * 4 + i % 2 * 2, element = 2 * half + i / 2;
      words[i] = pack<Element>(o[column][element] * scale, o[column + 1][element] * scale);
    }
    if (block * 32 < columns)
      ptx::st_global_16(g + block * 64, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// What turns scores into the output: places of this lane's first row of 16 queries, in `out` and lse.
template <typename Config>
struct TinyOutput {
  using Element = typename Config::Element;
  static constexpr int kColumnBlocks = Config::kColumnBlocks;

  const AttentionParams& params;
  LaneRows g;
  char* lse;
  unsigned lse_bytes;  // from row to row
  int columns;         // left from the lane's first
  float scale;
  // At least a tiny positive number: with scale 0 all scores are equal, but a masked one, -inf, must
  // stay so.
  float scale_log2;

  __device__ __forceinline__ TinyOutput(const AttentionParams& params, unsigned first_row,
                                        unsigned head, int column)
      : params(params),
        g(params.out, first_row, head, column),
        lse_bytes(params.heads * 4u),
        columns(params.dim_v - column),
        scale(static_cast<float>(params.scale)),
        scale_log2(fmaxf(fabsf(scale) * kLog2E, 1e-30f)) {
    lse = static_cast<char*>(params.lse) + static_cast<uint64_t>(first_row) * lse_bytes + head * 4;
  }

  __device__ __forceinline__ void next_rows() {
    g.data = g.row(16);
    lse += 16 * static_cast<uint64_t>(lse_bytes);
  }
  __device__ __forceinline__ void next_head() {
    g.data += static_cast<unsigned>(params.out.head_stride) * 2;
    lse += 4;
  }

  // `row` is the lane's first in the sequence.
  template <int kKeyBlocks>
  __device__ __forceinline__ void finish(TinyScores<Config, kKeyBlocks>& scores,
                                         const PairFragments<kColumnBlocks> (&v)[kKeyBlocks],
                                         const TinyWindow& window, int row, int queries, int keys,
                                         int lane) const {
    if (scale < 0.0f) scores.negate();  // the maximum of scale * S lies where -S is largest
    if (window.cuts()) {
      scores.mask_window(window, row, keys, lane);
    } else {
      scores.mask_end(keys, lane);
    }
    scores.softmax(scale_log2);
    float o[kColumnBlocks * 4][4] = {};
    scores.multiply(o, v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= queries) continue;
      const float sum = scores.row_sum[half];
      store_row<Element, kColumnBlocks>(o, half, sum == 0.0f ? 0.0f : ptx::rcp_approx(sum),
                                        g.row(half * 8), columns);
      if (lane % 4 == 0) {
        *reinterpret_cast<float*>(lse + half * 8 * static_cast<uint64_t>(lse_bytes)) =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(scores.row_max[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
  }
};

// Queries of one head from begin to end, of all blocks of 16, where the keys fill kKeyBlocks of them.
template <typename Config, int kKeyBlocks>
__device__ __forceinline__ void attend(const AttentionParams& params, const TinySequence& sequence,
                                       unsigned head, int begin, int end, int lane) {
  using Element = typename Config::Element;
  constexpr int kColumnBlocks = Config::kColumnBlocks;
  constexpr bool kLoadsAhead = kKeyBlocks < 4;  // registers are short with 64 keys
  const unsigned kv_head = params.heads == params.kv_heads
                               ? head
                               : head / static_cast<unsigned>(params.heads / params.kv_heads);
  const int queries = sequence.queries.len, keys = sequence.keys.len;
  // This lane's place in rows of Q, K and the output, and in pairs of rows of V.
  const int row = lane / 4, column = lane % 4 * 8, pair_row = lane % 4 * 2,
            pair_column = lane / 4 * 4;
  const unsigned first_row = sequence.queries.begin + begin + row;
  LaneRows gQ(params.q, first_row, head, column);
  const LaneRows gK(params.k, sequence.keys.begin + row, kv_head, column),
      gV(params.v, sequence.keys.begin + pair_row, kv_head, pair_column);
  RowFragments<kColumnBlocks> q, k[kKeyBlocks];
  PairFragments<kColumnBlocks> v[kKeyBlocks];
  q.load(gQ, 0, queries - begin - row, params.dim_qk - column);
#pragma unroll
  for (int block = 0; block < kKeyBlocks; ++block)
    k[block].load(gK, block * 16, keys - row, params.dim_qk - column);
#pragma unroll
  for (int block = 0; block < kKeyBlocks; ++block)
    v[block].load(gV, block * 16, keys - pair_row, params.dim_v - pair_column);

  TinyOutput<Config> output(params, first_row, head, column);
  const TinyWindow window(params, queries, keys);
#pragma unroll 1
  for (int query = begin; query < end; query += 16) {
    TinyScores<Config, kKeyBlocks> scores;
    scores.add_product(q, k);
    const bool more = query + 16 < end;
    gQ.data = gQ.row(16);
    if (kLoadsAhead && more) q.load(gQ, 0, queries - query - 16 - row, params.dim_qk - column);
    output.finish(scores, v, window, query + row, queries, keys, lane);
    if (!kLoadsAhead && more) q.load(gQ, 0, queries - query - 16 - row, params.dim_qk - column);
    output.next_rows();
  }
}

// Two heads of a sequence of at most 16 queries and keys, each with keys of its own: all loads come
// before the first product.
template <typename Config>
__device__ __forceinline__ void attend_pair(const AttentionParams& params,
                                            const TinySequence& sequence, unsigned head, int lane) {
  constexpr int kColumnBlocks = Config::kColumnBlocks;
  const int queries = sequence.queries.len, keys = sequence.keys.len;
  const int row = lane / 4, column = lane % 4 * 8, pair_row = lane % 4 * 2,
            pair_column = lane / 4 * 4;
  const unsigned first_row = sequence.queries.begin + row;
  LaneRows gQ(params.q, first_row, head, column),
      gK(params.k, sequence.keys.begin + row, head, column),
      gV(params.v, sequence.keys.begin + pair_row, head, pair_column);
  RowFragments<kColumnBlocks> q[2], k[2][1];
  PairFragments<kColumnBlocks> v[2][1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    q[i].load(gQ, 0, queries - row, params.dim_qk - column);
    k[i][0].load(gK, 0, keys - row, params.dim_qk - column);
    v[i][0].load(gV, 0, keys - pair_row, params.dim_v - pair_column);
    gQ.data += static_cast<unsigned>(params.q.head_stride) * 2;
    gK.data += static_cast<unsigned>(params.k.head_stride) * 2;
    gV.data += static_cast<unsigned>(params.v.head_stride) * 2;
  }
  TinyOutput<Config> output(params, first_row, head, column);
  const TinyWindow window(params, queries, keys);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    TinyScores<Config, 1> scores;
    scores.add_product(q[i], k[i]);
    output.finish(scores, v[i], window, row, queries, keys, lane);
    output.next_head();
  }
}

// A sequence without keys.
__device__ __forceinline__ void attend_to_nothing(const AttentionParams& params,
                                                  const TinySequence& sequence, unsigned head,
                                                  int lane) {
  store_zero_rows(params.out, sequence.queries, head, params.dim_v, lane);
  for (int row = lane; row < sequence.queries.len; row += 32) {
    const int64_t global_row = sequence.queries.begin + row;
    static_cast<float*>(params.lse)[global_row * params.heads + head] = -INFINITY;
  }
}

// Queries of one head from begin to end; one warp.
template <typename Config>
__device__ __forceinline__ void attend_blocks(const AttentionParams& params,
                                              const TinySequence& sequence, unsigned head,
                                              int begin, int end, int lane) {
  if (begin >= end) return;
  switch ((sequence.keys.len + 15) / 16) {
    case 0:
      return begin == 0 ? attend_to_nothing(params, sequence, head, lane) : void();
    case 1:
      return attend<Config, 1>(params, sequence, head, begin, end, lane);
    case 2:
      return attend<Config, 2>(params, sequence, head, begin, end, lane);
    case 3:
      return attend<Config, 3>(params, sequence, head, begin, end, lane);
    case 4:
      return attend<Config, 4>(params, sequence, head, begin, end, lane);
  }
}

// Queries of one head of a sequence, as many as there are of [begin, begin + 16 * blocks); one warp.
template <typename Config>
__device__ __forceinline__ void attend_tiny(const AttentionParams& params, unsigned seq,
                                            unsigned head, int begin, int blocks, int lane) {
  const TinySequence sequence = tiny_sequence(params, seq);
  attend_blocks<Config>(params, sequence, head, begin,
                        min(sequence.queries.len, begin + 16 * blocks), lane);
}

// A warp takes Config::kHeads heads of a sequence.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_tiny(
    const __grid_constant__ AttentionParams params) {
  constexpr unsigned kHeads = Config::kHeads;
  const unsigned heads = params.heads,
                 item_ctas = TinyItem::ctas(params, heads / kHeads, Config::kWarps);
  ptx::griddepcontrol_launch_dependents();  // launch_longer
  if (blockIdx.x >= item_ctas) {
    const unsigned cta = blockIdx.x - item_ctas;
    fill_outside(params.q_offsets, params.out.data, heads * params.dim_v / 2, 0.0f, cta);
    fill_outside(params.q_offsets, params.lse, heads, -INFINITY, cta);
    if (cta == 0) ptx::griddepcontrol_wait();  // launch_behind
    return;
  }
  const TinyItem item(heads / kHeads, Config::kWarps);
  if (item.seq >= params.q_offsets.num_seqs) return;
  const int lane = threadIdx.x % 32;
  if constexpr (kHeads == 1) {
    attend_tiny<Config>(params, item.seq, item.head, 0, kTinyRows / 16, lane);
  } else {
    const TinySequence sequence = tiny_sequence(params, item.seq);
    const int keys = sequence.keys.len;
    const unsigned head = item.head * kHeads;
    if (sequence.queries.len <= 16 && keys > 0 && keys <= 16) {
      attend_pair<Config>(params, sequence, head, lane);
    } else {
#pragma unroll 1
      for (unsigned i = 0; i < kHeads; ++i)
        attend_blocks<Config>(params, sequence, head + i, 0, sequence.queries.len, lane);
    }
  }
}

template <auto kKernel, typename Config>
cudaError_t launch_tiny_forward(const AttentionParams& params, cudaStream_t stream) {
  const Grid grid{int64_t{TinyItem::ctas(params, params.heads / Config::kHeads, Config::kWarps)} +
                  TinyItem::kFillCtas};
  return launch_behind<kKernel>(is_behind_long(params), params, grid, Config::kThreads, 0, stream,
                                path_behind_long(params, Config::kName));
}

template <typename Element>
cudaError_t launch_forward_tiny(const AttentionParams& params, cudaStream_t stream) {
  return for_dim<64>(params, [&](auto dim) {
    const auto launch_config = [&](auto config) {
      using Config = decltype(config);
      return launch_tiny_forward<forward_tiny<Config>, Config>(params, stream);
    };
    if (takes_pairs(params)) return launch_config(TinyForwardConfig<Element, dim.value, 2, true>());
    return are_most_short(params) ? launch_config(TinyForwardConfig<Element, dim.value, 1, true>())
                                  : launch_config(TinyForwardConfig<Element, dim.value>());
  });
}

}  // namespace jagged_cuda::attention
