// Backward of attention with ranges of keys, unused keys or biases, and of jagged_hstu_attention, on
// wgmma and TMA (compute capability 9.0), 16-bit elements. Mathematics and sums are those of
// backward_wgmma.cuh, seven products, no atomics, the same bits at every run. Silu needs neither O
// nor LSE nor delta: with z = scale S, h = z / 2 and t = tanh(h),
//     P = h + h t        dS = 1/2 (1 + x) dP        x = t + P (1 - t)
// and what a row's sums are multiplied by leaves them: only the factor that differs from row to row
// stays in P and dS of ranged_dkdv.
//
// Three kernels, each a programmatic dependent launch:
//     find_tile_bounds  a warp for each tile of queries: what it sees (visible.cuh); and tables of
//                       positions and what is known of times before (time_tiles.cuh)
//     ranged_dq         grid: x = tiles of kRows queries (find_tile), y = heads; leaves delta
//     ranged_dkdv       grid: x = tiles of kRows keys, y = kv heads; with silu it does not wait for
//                       ranged_dq, and fills the SMs as that drains
// A warpgroup owns 64 rows, a warp 16 of them. Where gradients of tables are wanted,
// ranged_dq_tables takes the place of ranged_dq: each of a fixed number of CTAs takes its share of
// the tiles, and adds up dS beside dQ (table_gradients.cuh).
//
// Biases (logit_bias.cuh) make z = scale S + bias. The gradient of a kv_bias is the sum of dS of a key
// over the queries, which ranged_dkdv has in registers.
//
// Masks. Window and ranges are two intervals of keys for each query. ranged_dq walks over the steps
// of keys that some query of its tile sees, and masks one only where a query of a warp does not see
// all of it. ranged_dkdv finds the tiles of queries that see some of its keys by their bounds, 32 at
// a time, and masks those that do not see all.
//
// Shared memory, in rows of 2 kDim bytes: dq: Q and dO kRows, K and V kStep in 2 stages each; dkdv:
// K and V kRows, Q and dO kStep in 2 stages each, lse and delta, or factors; 48 KiB for 64 dims and
// 96 for 128 (dkdv 1 more), and with times 7 more, so that four CTAs of dq with 64 dims fill an SM;
// with the gradients of tables 8 more and the sums. Gradients leave through the rows of Q, or of K and V.
//
// Barriers: `own`, for a table of times, too, and `full` of each stage: thread 0 arrives, with the bytes
// that it lets copy; all threads wait. One __syncthreads per step: all have finished the step before, whose stage is filled
// next, and zeros and 4-byte copies have been written. Where steps overlap in dq it stands behind
// the start of S, and zeros have one of their own. One more before gradients leave.
//
// A copy may reach into the next sequence. What is summed over its rows gets zeros there, since 0
// times NaN is NaN: K in dq, Q and dO in dkdv. V in dq does not: dS is replaced behind it. A CTA's
// own rows past the end make rows of gradients that are not stored. Rows outside all sequences get
// zeros, and so do keys that are not used or that nobody sees.
#pragma once

#include "cuda/kernels/attention/backward_wgmma.cuh"
#include "cuda/kernels/attention/logit_bias.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/attention/table_gradients.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/visible.cuh"
#include "cuda/kernels/prim/tanh.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, bool kSilu_, BiasKind kBias_>
struct RangedBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr bool kSilu = kSilu_;
  static constexpr BiasKind kBias = kBias_;
  static constexpr bool kBiased = kBias != BiasKind::kNone;
  // Else what is stored of silu is scaled and divided before it is rounded.
  static constexpr bool kHasFloatRange = std::is_same_v<Element, __nv_bfloat16>;
  // Whether dQ of a step is still computed while S of the next is: where few CTAs share an SM.
  static constexpr bool kOverlapsSteps = kDim == 128;
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;  // queries or keys that a CTA owns
  static constexpr int kStep = 64;  // keys or queries of an iteration

  // CTAs per SM.
  static constexpr int kDqCtas = kDim == 128 ? 2 : kBias == BiasKind::kAny ? 3 : 4;
  static constexpr int kDkdvCtas = kDim == 128 || kBias == BiasKind::kAny ? 2 : 3;
  static constexpr int kTablesCtas = kDim == 128 ? 2 : 3;
  static constexpr PathName kName = PathName("cuda.attention.backward.wgmma.d") + kDim +
                                    (kSilu ? ".silu" : ".general") + (kBiased ? ".bias" : "");
  static_assert(kDim == 64 || kDim == 128);
};

struct RangedBackwardParams {
  CUtensorMap q;  // boxes of 64 rows of one head
  CUtensorMap grad_out;
  CUtensorMap k;
  CUtensorMap v;
  AttentionBackwardParams attention;
};

// Barriers of copies: of the CTA's own rows, and of each stage.
struct CopyBarriers {
  uint64_t own;
  uint64_t full[2];

  // All threads of the CTA.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(own, 1);
      ptx::mbarrier_init(full[0], 1);
      ptx::mbarrier_init(full[1], 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }
};

template <typename Config>
struct RangedDqStorage : DqWgmmaStorage<Config> {
  LogitStep<Config::kBias> sBias[2];
  LogitTable<Config::kBias> bias_table;
  CopyBarriers barriers;
};
template <typename Config>
struct RangedDkdvStorage : DkdvWgmmaStorage<Config> {
  LogitStep<Config::kBias> sBias[2];
  LogitTable<Config::kBias> bias_table;
  KeyOfLane<Config::kBias> keys[Config::kThreads];
  CopyBarriers barriers;
};
// With the gradients of tables; behind it their sums.
template <typename Config>
struct RangedTablesStorage : RangedDqStorage<Config> {
  TableGradientStorage<Config::kBias> tables;
};

// Copies the same rows of two operands; one thread. `more` bytes will be copied, too.
template <typename Tile>
__device__ __forceinline__ void copy_pair(Tile& a, const CUtensorMap& a_map, Tile& b,
                                          const CUtensorMap& b_map, int64_t row, int head,
                                          uint64_t& full, int more = 0) {
  ptx::mbarrier_arrive_expect_tx(full, 2 * static_cast<int>(sizeof(a.data)) + more);
  copy_expected_tile(a, a_map, row, head, full);
  copy_expected_tile(b, b_map, row, head, full);
}

// `shared` by an address that is known to be one for all lanes of a warp: with times, where there is
// much else, each lane would find the descriptors of products for itself.
template <typename Config, typename T>
__device__ __forceinline__ T& uniform(T& shared) {
  if constexpr (has_times(Config::kBias)) {
    return *static_cast<T*>(
        __cvta_shared_to_generic(__reduce_max_sync(0xffffffffu, ptx::shared_address(&shared))));
  } else {
    return shared;
  }
}

// Rows of a tile from `rows` on become zeros, since 0 times NaN is NaN; the caller fences.
template <int kThreads, typename Tile>
__device__ __forceinline__ void zero_rows_from(Tile& tile, int rows) {
#pragma unroll 1
  for (int index = threadIdx.x; index < (Tile::kRows - rows) * Tile::kChunks; index += kThreads) {
    *reinterpret_cast<uint4*>(tile.chunk(rows + index / Tile::kChunks, index % Tile::kChunks)) =
        make_uint4(0, 0, 0, 0);
  }
}

// silu of a logit z, and its slope, in as few instructions as there can be: with h = z / 2 and
// t = tanh(h) the one is h + h t and the other half of 1 + t + silu(z) (1 - t).
struct SiluOf {
  float value;
  float slope;  // 2 silu'(z) - 1

  __device__ __forceinline__ explicit SiluOf(float h) {
    const float t = ptx::tanh_approx(h);
    value = __fmaf_rn(h, t, h);
    slope = __fmaf_rn(value, 1.0f - t, t);
  }
  // Of a score that is hidden.
  static constexpr float kNoSlope = -1.0f;
};

// What logits are in: what the function of a score takes.
template <bool kSilu>
constexpr float kLogitUnit = kSilu ? 0.5f : kLog2E;

constexpr int kBoundsThreads = 128;

// The rows of that grid behind the first.
template <int kRows>
__device__ __forceinline__ void find_bias_tables(const AttentionBackwardParams& params,
                                                 int64_t index) {
  const TimeTiles times(params);
  const ScoreBias& bias = params.bias;
  const float unit = params.silu ? kLogitUnit<true> : kLogitUnit<false>;
  int kind = static_cast<int>(blockIdx.y) - 1;
  if (bias.position_table != nullptr) {
    if (kind < bias.position_heads) {
      PositionTable(params, kind)
          .fill(bias, kind, unit, blockIdx.x * kBoundsThreads + threadIdx.x,
                gridDim.x * kBoundsThreads);
      return;
    }
    kind -= bias.position_heads;
  }
  if (kind < 2) {
    const bool of_keys = kind == 1;
    const OffsetsView& offsets = of_keys ? params.kv_offsets : params.q_offsets;
    if (index >= offsets.total / kRows + offsets.num_seqs + 2) return;
    const JaggedTile tile = find_tile<kRows>(offsets, index);
    if (tile.seq < 0 || tile.row >= tile.rows.len) return;
    times.find_spans(of_keys, tile, of_keys ? bias.kv_time : bias.q_time);
  } else if (blockIdx.x == 0) {
    const int64_t table = kind - 2;
    times.tables[table].fill<kBoundsThreads>(
        bias, static_cast<const float*>(bias.time_table) + table * bias.time_buckets, unit);
  }
}

// Row y = 0 of the grid: a warp for each tile of kRows queries, what it sees. With position_bias some
// rows write its tables; with time_bias two find the spans of times of queries and keys, and each
// other one fills a table of cells.
template <int kRows>
__global__ __launch_bounds__(kBoundsThreads) void find_tile_bounds(
    const __grid_constant__ AttentionBackwardParams params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t index = int64_t{blockIdx.x} * (kBoundsThreads / 32) + threadIdx.x / 32;
  if (blockIdx.y > 0) {
    find_bias_tables<kRows>(params, index);
    return;
  }
  if (index >= params.q_offsets.total / kRows + params.q_offsets.num_seqs + 2) return;
  const JaggedTile tile = find_tile<kRows>(params.q_offsets, index);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int num_keys = static_cast<int>(used_rows(params, tile.seq).len);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const TileBounds bounds = TileBounds::of(params, window, tile.rows.begin + row, row,
                                           min(kRows, num_queries - row), num_keys);
  if (threadIdx.x % 32 == 0) static_cast<TileBounds*>(params.tile_bounds)[index] = bounds;
}

// One tile of queries. `place` and `own_parity` are where the barriers of the CTA stand.
template <typename Config, typename Tables>
__device__ __forceinline__ void ranged_dq_of_tile(const RangedBackwardParams& kernel_params,
                                                  RangedDqStorage<Config>& shared, JaggedTile tile,
                                                  RingPosition<2>& place, int& own_parity,
                                                  Tables* tables) {
  const AttentionBackwardParams& params = kernel_params.attention;
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  constexpr bool kTables = !std::is_void_v<Tables>;
  using Bias = LogitBias<Config::kBias, false>;
  constexpr float kUnit = kLogitUnit<Config::kSilu>;

  if (tile.row >= tile.rows.len) return;
  // Late queries, which often see more keys, come first, but for the first tile, which may hold
  // queries that see all.
  if (tile.seq >= 0 && tile.row > 0)
    tile.row = (tile.rows.len + kRows - 1) / kRows * kRows - tile.row;
  const int row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kRows, num_queries - row);
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + row;
  if (tile.seq < 0) {
    store_zeros<kThreads>(row_of<Element>(params.grad_q, global_row, head),
                          params.grad_q.row_stride, rows, params.dim_qk);
    return;
  }
  const bool copies = threadIdx.x == 0;
  if (copies) {
    copy_pair(shared.sQ, kernel_params.q, shared.sGradOut, kernel_params.grad_out, global_row, head,
              shared.barriers.own, Bias::table_bytes(params.bias));
  }
  const RowRange kv = used_rows(params, tile.seq);
  const int num_keys = static_cast<int>(kv.len);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  // Only then may ranged_dkdv start, which reads them without a wait of its own.
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const VisibleSteps<kStep> steps(tile_bounds<kRows>(params, tile.rows.begin, tile.seq) +
                                  row / kRows);

  const auto copy_keys = [&](int key, int stage) {
    copy_pair(shared.sK[stage], kernel_params.k, shared.sV[stage], kernel_params.v, kv.begin + key,
              kv_head, shared.barriers.full[stage]);
  };
  constexpr bool kLoadsBias = has_key_bias(Config::kBias) || has_times(Config::kBias);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  Bias bias(params, tile.seq, tile.rows, kv, row, warp_row, kUnit, shared.bias_table);
  bias.set_load_head(head);
  KeyOfLane<BiasKind::kNone> no_keys;
  bias.set_head(head, no_keys);
  if (copies) bias.copy_table(head, shared.barriers.own);
  const auto copy_bias = [&](int key, int stage) {
    if constexpr (kLoadsBias) {
      bias.load(shared.sBias[stage], key);
      ptx::cp_async_commit();
    }
  };
  const auto finish_bias = [&](int key, int stage) {
    if constexpr (kLoadsBias) {
      ptx::cp_async_wait<0>();
      bias.finish_load(shared.sBias[stage]);
    }
  };
  if (steps.any()) {
    if (copies) copy_keys(steps.first, place.stage);
    copy_bias(steps.first, place.stage);
  }

  const float scale = static_cast<float>(params.scale), scale_of_logits = scale * kUnit;
  const float weight = Config::kSilu ? 1.0f / silu_divisor<float>(params, num_keys) : 1.0f;
  const float slope_factor = Config::kSilu ? 0.5f * weight : 1.0f;  // what dS lacks
  VisibleKeys visible[2];                                           // of the lane's two rows
  float lse_log2[2], delta[2];
  OutRows<Element, kDim> out_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = warp_row + 8 * half + lane / 4;
    const bool valid = own_row < rows;
    const int some_row = valid ? own_row : rows - 1;
    visible[half] = VisibleKeys(params, window, global_row + some_row, row + some_row, num_keys);
    if (kTables && !valid) visible[half] = {};
    if constexpr (!Config::kSilu) {
      const int64_t statistic = (global_row + own_row) * params.heads + head;
      out_rows[half].load(row_of<Element>(params.out, global_row + own_row, head),
                          valid ? params.dim_v : 0, lane);
      const float lse = valid ? static_cast<const float*>(params.lse)[statistic] : 0.0f;
      lse_log2[half] = Config::kBiased ? lse_in_log2(lse, kMostLse) : lse * kLog2E;
      delta[half] = valid && params.grad_lse != nullptr
                        ? -static_cast<const float*>(params.grad_lse)[statistic]
                        : 0.0f;
    }
  }
  VisibleHull hull;
  if constexpr (has_times(Config::kBias)) hull = VisibleHull(visible);
  ptx::mbarrier_wait(shared.barriers.own, own_parity);
  own_parity ^= 1;
  if constexpr (!Config::kSilu) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = warp_row + 8 * half + lane / 4;
      delta[half] += out_rows[half].dot(shared.sGradOut, own_row, lane);
      if (own_row < rows && lane % 4 == 0) {
        static_cast<float*>(params.delta)[(global_row + own_row) * params.heads + head] =
            delta[half];
      }
    }
  }

  const auto row_factor = [&](int half) {
    const float factor = Config::kHasFloatRange ? slope_factor : 1.0f;
    if (!Config::kSilu || params.row_scale == nullptr) return factor;
    const int own_row = min(warp_row + 8 * half + lane / 4, rows - 1);
    return factor * __ldg(static_cast<const float*>(params.row_scale) + global_row + own_row);
  };
  const float table_factors[2] = {kTables ? row_factor(0) : 0.0f, kTables ? row_factor(1) : 0.0f};
  Accumulator<1, kOutBlocks> dq = {};
  for (int key = steps.first; key < steps.last;) {
    const int next_key = steps.next(key), stage = place.stage;
    ptx::mbarrier_wait(shared.barriers.full[stage], place.parity);
    if (key + kStep > num_keys) {
      zero_rows_from<kThreads>(shared.sK[stage], num_keys - key);
      ptx::fence_proxy_async();
      if constexpr (Config::kOverlapsSteps) __syncthreads();
    }
    finish_bias(key, stage);
    // The step before is done with the other stage.
    if constexpr (!Config::kOverlapsSteps) __syncthreads();
    Accumulator<1, kScoreBlocks> s, dp;
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sQ, 0, shared.sK[stage]);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, shared.sGradOut, 0, shared.sV[stage]);
    ptx::wgmma_commit_group();
    if constexpr (Config::kOverlapsSteps) {
      ptx::wgmma_wait_group<2>();
      ptx::fence_operands(dq[0]);
      __syncthreads();
    }
    if (next_key < steps.last) {
      if (copies) copy_keys(next_key, stage ^ 1);
      copy_bias(next_key, stage ^ 1);
    }
    if constexpr (kTables) tables->merge();
    const unsigned hidden = has_times(Config::kBias) ? hull.hidden_groups(key) : 0;
    bias.prepare(key);
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    if constexpr (Config::kBiased) {
      bias.template scale_and_add<kTables>(s, scale_of_logits, shared.sBias[stage], no_keys, key,
                                           hidden, lane);
    }
    if constexpr (Config::kSilu) {
      for_each_score(s, [&](float& score) {
        score = SiluOf(Config::kBiased ? score : score * scale_of_logits).slope;
      });
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 4; ++i) {
        const float grad = dp[0][i / 4][i % 4];
        float& own = s[0][i / 4][i % 4];
        own = __fmaf_rn(own, grad, grad);
        if constexpr (!Config::kHasFloatRange) own *= slope_factor;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 4; ++i) {
        float& score = s[0][i / 4][i % 4];
        const float z = Config::kBiased ? score : score * scale_of_logits;
        score = ptx::ex2_approx(z - lse_log2[i % 4 / 2]);
      }
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 4; ++i)
        s[0][i / 4][i % 4] *= dp[0][i / 4][i % 4] - delta[i % 4 / 2];
    }
    if (__any_sync(0xffffffffu, !visible[0].holds(key, kStep) || !visible[1].holds(key, kStep)))
      replace_hidden(s, 0.0f, visible, key, lane);
    const PackedRows<Element, kScoreBlocks> ds(s);
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dq, ds, shared.sK[stage]);
    ptx::wgmma_commit_group();
    if constexpr (kTables) {
      tables->add(bias, s, table_factors, shared.sBias[stage], key, hidden, lane);
    }
    if constexpr (!Config::kOverlapsSteps) {
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dq[0]);
    }
    key = next_key;
    place.advance();
  }
  if constexpr (Config::kOverlapsSteps) {
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq[0]);
  }
  // dq leaves through sQ, when the products of all warps are done (backward_wgmma.cuh).
  __syncthreads();
  if constexpr (kTables) tables->merge();
  const float scales[1][2] = {{row_factor(0) * scale, row_factor(1) * scale}};
  store_rows(dq, scales, shared.sQ, warp_row, 0, row_of<Element>(params.grad_q, global_row, head),
             params.grad_q.row_stride, rows, params.dim_qk, true, lane);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kDqCtas) void ranged_dq(
    const __grid_constant__ RangedBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<RangedDqStorage<Config>*>(wgmma_shared_bytes);
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
  const JaggedTile tile = find_tile<Config::kRows>(params.attention.q_offsets, blockIdx.x);
  if (tile.seq >= 0 && tile.row < tile.rows.len) shared.barriers.init();
  RingPosition<2> place;
  int own_parity = 0;
  ranged_dq_of_tile<Config, void>(params, shared, tile, place, own_parity, nullptr);
}

// The same and the gradients of tables. Grid: x = table_ctas, y = heads.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kTablesCtas) void ranged_dq_tables(
    const __grid_constant__ RangedBackwardParams params) {
  constexpr int kRows = Config::kRows, kThreads = Config::kThreads;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<RangedTablesStorage<Config>*>(wgmma_shared_bytes);
  using Tables = TableGradients<Config::kBias>;
  const ScoreBias& bias = params.attention.bias;
  auto* sums = reinterpret_cast<float*>(&shared + 1);
  const int num_sums = Tables::num_sums(bias);
  for (int i = threadIdx.x; i < num_sums; i += kThreads) sums[i] = 0.0f;
  shared.barriers.init();
  Tables tables(bias, shared.tables, sums);
  RingPosition<2> place;
  int own_parity = 0;
  const OffsetsView& offsets = params.attention.q_offsets;
  const int64_t tiles = offsets.total / kRows + offsets.num_seqs + 2;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    ranged_dq_of_tile<Config, Tables>(params, shared, find_tile<kRows>(offsets, index), place,
                                      own_parity, &tables);
    ptx::fence_proxy_async();
    __syncthreads();  // before the next tile's copies
  }
  tables.finish(params.attention, threadIdx.x % 32);
  ptx::griddepcontrol_wait();
}

// kSums: with the gradient of kv_bias.
template <typename Config, bool kSums>
__global__ __launch_bounds__(Config::kThreads, Config::kDkdvCtas) void ranged_dkdv(
    const __grid_constant__ RangedBackwardParams kernel_params) {
  const AttentionBackwardParams& params = kernel_params.attention;
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<RangedDkdvStorage<Config>*>(wgmma_shared_bytes);

  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
  // The tile: `rows` used keys from tile.row on, `stored` in all; `queries` are the rows of q in the
  // same sequence.
  const JaggedTile tile = find_tile<kRows>(params.kv_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row);
  const int num_keys =
      static_cast<int>(tile.seq < 0 ? 0 : used_keys(params, tile.seq, tile.rows.len));
  const int stored = static_cast<int>(min(int64_t{kRows}, tile.rows.len - tile.row));
  const int rows = min(kRows, max(num_keys - row, 0));
  const int kv_head = blockIdx.y, group = params.heads / params.kv_heads;
  const int64_t global_row = tile.rows.begin + row;
  Element* gGradK = row_of<Element>(params.grad_k, global_row, kv_head);
  Element* gGradV = row_of<Element>(params.grad_v, global_row, kv_head);
  if (stored > rows) {
    store_zeros<kThreads>(gGradK + rows * params.grad_k.row_stride, params.grad_k.row_stride,
                          stored - rows, params.dim_qk);
    store_zeros<kThreads>(gGradV + rows * params.grad_v.row_stride, params.grad_v.row_stride,
                          stored - rows, params.dim_v);
    if (rows == 0) return;
  }
  shared.barriers.init();
  const bool copies = threadIdx.x == 0;
  using Bias = LogitBias<Config::kBias, true>;
  if (copies) {
    copy_pair(shared.sK, kernel_params.k, shared.sV, kernel_params.v, global_row, kv_head,
              shared.barriers.own, Bias::table_bytes(params.bias));
  }
  const RowRange queries = sequence_rows(params.q_offsets, tile.seq);
  const int num_queries = static_cast<int>(queries.len);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  constexpr float kUnit = kLogitUnit<Config::kSilu>;
  Bias bias(params, tile.seq, queries, {tile.rows.begin, num_keys}, row, warp_row, kUnit,
            shared.bias_table);
  KeyOfLane<Config::kBias>& keys = shared.keys[threadIdx.x];
  bias.set_load_head(kv_head * group);
  bias.set_head(kv_head * group, keys);
  if (copies) bias.copy_table(kv_head * group, shared.barriers.own);
  constexpr bool kLoadsBias = has_times(Config::kBias);
  const bool has_factors = Config::kSilu && params.row_scale != nullptr;
  const auto load_queries = [&](int head, int query, int stage) {
    const int64_t first = queries.begin + query;
    const int valid = num_queries - query;
    if (copies) {
      copy_pair(shared.sQ[stage], kernel_params.q, shared.sGradOut[stage], kernel_params.grad_out,
                first, head, shared.barriers.full[stage]);
    }
    if constexpr (kLoadsBias) bias.load(shared.sBias[stage], query);
    const int r = static_cast<int>(threadIdx.x);
    if ((Config::kSilu && !has_factors) || r >= kStep) {
      ptx::cp_async_commit();
      return;
    }
    const int64_t own = first + (r < valid ? r : 0), statistic = own * params.heads + head;
    const int bytes = r < valid ? 4 : 0;
    if constexpr (Config::kSilu) {
      ptx::cp_async_4(&shared.sDelta[stage][r], static_cast<const float*>(params.row_scale) + own,
                      bytes);
    } else {
      ptx::cp_async_4(&shared.sLse[stage][r], static_cast<const float*>(params.lse) + statistic,
                      bytes);
      ptx::cp_async_4(&shared.sDelta[stage][r], static_cast<const float*>(params.delta) + statistic,
                      bytes);
    }
    ptx::cp_async_commit();
  };
  if constexpr (!Config::kSilu) ptx::griddepcontrol_wait();  // for delta
  SeeingTiles tiles(tile_bounds<kStep>(params, queries.begin, tile.seq),
                    (num_queries + kStep - 1) / kStep, row, rows);
  int head = kv_head * group;
  const int last_head = head + group;
  bool is_cut = false, next_is_cut = false;
  int query = tiles.next(is_cut) * kStep;
  if (query < num_queries) {
    load_queries(head, query, 0);
  } else {
    head = last_head;
  }

  const float scale = static_cast<float>(params.scale), scale_of_logits = scale * kUnit;
  const float weight = Config::kSilu ? 1.0f / silu_divisor<float>(params, num_keys) : 1.0f;
  const float slope_factor = Config::kSilu ? 0.5f * weight : 1.0f;  // what dS lacks
  Accumulator<1, kOutBlocks> dk = {}, dv = {};
  int step = 0;
  ptx::mbarrier_wait(shared.barriers.own, 0);
  while (head < last_head) {
    const int stage = __reduce_max_sync(0xffffffffu, step % 2), parity = step / 2 % 2,
              valid = num_queries - query;
    ptx::mbarrier_wait(shared.barriers.full[stage], parity);
    if (valid < kStep) {
      zero_rows_from<kThreads>(shared.sQ[stage], valid);
      zero_rows_from<kThreads>(shared.sGradOut[stage], valid);
      ptx::fence_proxy_async();
    }
    if (!Config::kSilu || has_factors || kLoadsBias) {
      ptx::cp_async_wait<0>();
      if (!Config::kSilu && threadIdx.x < kStep) {
        float& lse = shared.sLse[stage][threadIdx.x];
        lse = Config::kBiased ? lse_in_log2(lse, kMostLse) : lse * kLog2E;
        // P of queries past the end is 0, whatever their bias.
        if (Config::kBiased && static_cast<int>(threadIdx.x) >= valid) lse = INFINITY;
      }
    }
    __syncthreads();                     // the step before is done with the other stage
    Accumulator<1, kScoreBlocks> s, dp;  // S^T and dP^T
    ptx::wgmma_fence();
    auto& operands = uniform<Config>(shared);
    wgmma_rows_by_rows(s, operands.sK, 0, operands.sQ[stage]);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, operands.sV, 0, operands.sGradOut[stage]);
    ptx::wgmma_commit_group();
    int next_head = head, next_query = tiles.next(next_is_cut) * kStep;
    if (next_query >= num_queries && ++next_head < last_head) {
      tiles.restart();
      next_query = tiles.next(next_is_cut) * kStep;
    }
    if (next_head != head && next_head < last_head) bias.set_load_head(next_head);
    if (next_head < last_head) load_queries(next_head, next_query, stage ^ 1);
    SeenBy64 seen;
    if (is_cut) {
      seen = SeenBy64(params, window, queries.begin + query, query, min(kStep, valid), num_keys,
                      row + warp_row, lane);
    }
    unsigned hidden = 0;  // groups of 16 queries
    if constexpr (has_times(Config::kBias))
      hidden = is_cut ? seen.hidden_groups() : ~bits_below((valid + 15) / 16) & 0xf;
    bias.prepare(query);
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    PackedRows<Element, kScoreBlocks> p;
    if constexpr (Config::kBiased) {
      bias.template scale_and_add<false>(s, scale_of_logits, shared.sBias[stage], keys, query,
                                         hidden, lane);
    }
    if constexpr (Config::kSilu) {  // s becomes the slopes
      const auto activate = [&](auto with_factors) {
#pragma unroll
        for (int block = 0; block < kScoreBlocks; ++block) {
          float2 factor = {1.0f, 1.0f};
          if constexpr (with_factors.value != 0)
            factor =
                *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float* own = &s[0][block][2 * half];
            const float by = Config::kBiased ? 1.0f : scale_of_logits;
            const SiluOf silu[2] = {SiluOf(own[0] * by), SiluOf(own[1] * by)};
            p.set(block, half, {silu[0].value * factor.x, silu[1].value * factor.y});
            own[0] = silu[0].slope;
            own[1] = silu[1].slope;
          }
        }
      };
      if (has_factors) {
        activate(Constant<1>{});
      } else {
        activate(Constant<0>{});
      }
      if (is_cut) seen.keep(p, s, SiluOf::kNoSlope, lane);
    } else {
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const float2 lse =
            *reinterpret_cast<const float2*>(&shared.sLse[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float z = Config::kBiased ? s[0][block][i] : s[0][block][i] * scale_of_logits;
          s[0][block][i] = ptx::ex2_approx(z - (i % 2 == 0 ? lse.x : lse.y));
        }
      }
      if (is_cut) seen.keep(s, lane);
      p = PackedRows<Element, kScoreBlocks>(s);
    }
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dv, p, uniform<Config>(shared.sGradOut[stage]));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dp[0]);
    if constexpr (Config::kSilu) {
      if (has_factors) {
#pragma unroll
        for (int block = 0; block < kScoreBlocks; ++block) {
          const float2 factor =
              *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
          for (int i = 0; i < 4; ++i) dp[0][block][i] *= i % 2 == 0 ? factor.x : factor.y;
        }
      }
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 4; ++i) {
        const float grad = dp[0][i / 4][i % 4];
        float& own = s[0][i / 4][i % 4];
        own = __fmaf_rn(own, grad, grad);
        if constexpr (!Config::kHasFloatRange) own *= slope_factor;
      }
    } else {
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[0][block][i] *= dp[0][block][i] - (i % 2 == 0 ? delta.x : delta.y);
      }
    }
    // Always, where registers are few: a branch between two products makes ptxas run out of them.
    if constexpr (kSums) {
      if (Config::kBias == BiasKind::kKeys || params.key_sums != nullptr) keys.add(s);
    }
    const PackedRows<Element, kScoreBlocks> ds(s);
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, uniform<Config>(shared.sQ[stage]));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    if (next_head != head) {
      if constexpr (kSums) {
        if (params.key_sums != nullptr) {
          float key_sums[1][2];
          keys.take_sums(key_sums, Config::kSilu && Config::kHasFloatRange ? slope_factor : 1.0f);
          store_key_sums(params, key_sums, global_row, warp_row, rows, head, lane);
        }
      }
      if (next_head < last_head) {
        bias.set_head(next_head, keys);
        if constexpr (has_times(Config::kBias)) {
          __syncthreads();  // of the table before
          if (copies) {
            ptx::mbarrier_arrive_expect_tx(shared.barriers.own, Bias::table_bytes(params.bias));
            bias.copy_table(next_head, shared.barriers.own);
          }
          ptx::mbarrier_wait(shared.barriers.own, (next_head - kv_head * group) % 2);
        }
      }
    }
    head = next_head;
    query = next_query;
    is_cut = next_is_cut;
    ++step;
  }
  __syncthreads();  // all products are done with K and V, through whose rows the gradients leave
  const float key_factor = Config::kHasFloatRange ? scale * slope_factor : scale;
  const float scales[1][2] = {{key_factor, key_factor}};
  const float value_scales[1][2] = {{weight, weight}};
  store_rows(dk, scales, shared.sK, warp_row, 0, gGradK, params.grad_k.row_stride, rows,
             params.dim_qk, true, lane);
  store_rows(dv, value_scales, shared.sV, warp_row, 0, gGradV, params.grad_v.row_stride, rows,
             params.dim_v, true, lane);
}

template <typename Config>
cudaError_t launch_ranged_tables(const RangedBackwardParams& params, cudaStream_t stream) {
  using Storage = RangedTablesStorage<Config>;
  using Tables = TableGradients<Config::kBias>;
  constexpr auto kKernel = ranged_dq_tables<Config>;
  const auto bytes = [](int sums) {
    return static_cast<int>(sizeof(Storage) + sums * sizeof(float));
  };
  constexpr int kMostBuckets = 2048;
  const cudaError_t error =
      allow_shared_memory<kKernel>(bytes(Tables::num_sums(kMostBuckets, kMostBuckets)));
  if (error != cudaSuccess) return error;
  const AttentionBackwardParams& attention = params.attention;
  return launch_dependent<kKernel>(params, {attention.table_ctas, attention.heads},
                                   Config::kThreads, bytes(Tables::num_sums(attention.bias)),
                                   stream, Config::kName);
}

template <typename Element, int kDim, bool kSilu, BiasKind kBias>
cudaError_t launch_ranged_backward(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Config = RangedBackwardConfig<Element, kDim, kSilu, kBias>;
  using DqStorage = RangedDqStorage<Config>;
  using DkdvStorage = RangedDkdvStorage<Config>;
  using Tile = WarpgroupTile<Element, Config::kRows, kDim>;
  static_assert(Config::kRows == Config::kStep);
  RangedBackwardParams params;
  params.attention = attention;
  const OffsetsView &q_offsets = attention.q_offsets, &kv_offsets = attention.kv_offsets;
  const cudaError_t errors[] = {
      encode_heads<Tile>(params.q, attention, attention.q, q_offsets.total, attention.heads,
                         attention.dim_qk),
      encode_heads<Tile>(params.grad_out, attention, attention.grad_out, q_offsets.total,
                         attention.heads, attention.dim_v),
      encode_heads<Tile>(params.k, attention, attention.k, kv_offsets.total, attention.kv_heads,
                         attention.dim_qk),
      encode_heads<Tile>(params.v, attention, attention.v, kv_offsets.total, attention.kv_heads,
                         attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  const auto grid = [&](const OffsetsView& offsets, int heads) {
    return Grid{num_tiles(offsets.total, offsets.num_seqs, Config::kRows), heads};
  };
  constexpr int kWarps = kBoundsThreads / 32;
  int64_t tiles = num_tiles(q_offsets.total, q_offsets.num_seqs, Config::kRows);
  int kinds = 1;  // rows of its grid
  if (attention.bias.position_table != nullptr) kinds += attention.bias.position_heads;
  if (attention.bias.time_table != nullptr) {
    tiles = std::max(tiles, num_tiles(kv_offsets.total, kv_offsets.num_seqs, Config::kRows));
    kinds += 2 + attention.bias.time_heads;
  }
  cudaError_t error = launch<find_tile_bounds<Config::kRows>>(
      attention, Grid{(tiles + kWarps - 1) / kWarps, kinds}, kBoundsThreads, 0, stream, nullptr);
  if (error != cudaSuccess) return error;
  error = [&] {
    if constexpr (has_positions(kBias) || has_times(kBias)) {
      if (attention.table_ctas > 0) return launch_ranged_tables<Config>(params, stream);
    }
    return launch_dependent<ranged_dq<Config>>(params, grid(q_offsets, attention.heads),
                                               Config::kThreads, sizeof(DqStorage), stream,
                                               Config::kName);
  }();
  if (error != cudaSuccess) return error;
  const auto launch_dkdv = [&](auto sums) {
    return launch_dependent<ranged_dkdv<Config, sums.value != 0>>(
        params, grid(kv_offsets, attention.kv_heads), Config::kThreads, sizeof(DkdvStorage),
        stream);
  };
  if constexpr (kBias == BiasKind::kKeys) {
    if (attention.key_sums == nullptr) return launch_dkdv(Constant<0>{});
  }
  return launch_dkdv(Constant<has_key_bias(kBias) ? 1 : 0>{});
}

template <typename Element>
cudaError_t launch_backward_ranged(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto launch = [&](auto dim, auto bias) {
    constexpr auto kBias = static_cast<BiasKind>(bias.value);
    return params.silu ? launch_ranged_backward<Element, dim.value, true, kBias>(params, stream)
                       : launch_ranged_backward<Element, dim.value, false, kBias>(params, stream);
  };
  const auto launch_dim = [&](auto dim) {
    switch (bias_kind(params.bias)) {
      case BiasKind::kNone:
        return launch(dim, Constant<int(BiasKind::kNone)>{});
      case BiasKind::kKeys:
        return launch(dim, Constant<int(BiasKind::kKeys)>{});
      case BiasKind::kPositions:
        return launch(dim, Constant<int(BiasKind::kPositions)>{});
      case BiasKind::kTimes:
        return launch(dim, Constant<int(BiasKind::kTimes)>{});
      default:
        return launch(dim, Constant<int(BiasKind::kAny)>{});
    }
  };
  const cudaError_t error =
      dim_bucket(params) <= 64 ? launch_dim(Constant<64>{}) : launch_dim(Constant<128>{});
  if (error != cudaErrorNotSupported) return error;
  return launch_backward_mma_sync<Element>(params, stream);
}

}  // namespace jagged_cuda::attention
