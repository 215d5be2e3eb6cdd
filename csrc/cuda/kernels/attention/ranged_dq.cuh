// dQ of the backward pass with ranges, biases or silu (ranged_backward.cuh), delta for ranged_dkdv,
// and the gradients of tables. For each step of keys that the tile of queries sees:
//     copy K and V, and the biases, of the next step
//     start S = Q K^T, dP = dO V^T
//     softmax: P = exp2(...), dS = P * (dP - delta)        silu: slopes x, dS = (1 + x) dP
//     zeros where a query does not see a key
//     start dQ += dS K
#pragma once

#include "cuda/kernels/attention/ranged_backward_tile.cuh"
#include "cuda/kernels/attention/table_gradients.cuh"
#include "cuda/kernels/attention/visible.cuh"

namespace jagged_cuda::attention {

template <typename Config>
struct RangedDqStorage : DqWgmmaStorage<Config> {
  LogitStep<Config::kBias> sBias[2];
  LogitTable<Config::kBias> bias_table;
  CopyBarriers barriers;
};
// With the gradients of tables; behind it their sums.
template <typename Config>
struct RangedTablesStorage : RangedDqStorage<Config> {
  TableGradientStorage<Config::kBias> tables;
};

// --- verbs: rows are queries, of which a lane has two

// Scores, or logits, become the slopes of silu.
template <typename Config, int kBlocks>
__device__ __forceinline__ void replace_by_slopes(Accumulator<1, kBlocks>& s,
                                                  float scale_of_logits) {
  for_each_score(s, [&](float& score) {
    score = SiluOf(Config::kBiased ? score : score * scale_of_logits).slope;
  });
}
// P = exp2(...)
template <typename Config, int kBlocks>
__device__ __forceinline__ void exponentiate_rows(Accumulator<1, kBlocks>& s, float scale_of_logits,
                                                  const float (&lse_log2)[2]) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) {
    float& score = s[0][i / 4][i % 4];
    const float z = Config::kBiased ? score : score * scale_of_logits;
    score = ptx::ex2_approx(z - lse_log2[i % 4 / 2]);
  }
}
// dS = P * (dP - delta), to s.
template <int kBlocks>
__device__ __forceinline__ void multiply_rows(Accumulator<1, kBlocks>& s,
                                              const Accumulator<1, kBlocks>& dp,
                                              const float (&delta)[2]) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i)
    s[0][i / 4][i % 4] *= dp[0][i / 4][i % 4] - delta[i % 4 / 2];
}

// --- the kernels

// One tile of queries. `place` and `own_parity` are where the barriers of the CTA stand.
template <typename Config, typename Tables>
__device__ __forceinline__ void ranged_dq_of_tile(const BackwardOperands& kernel_params,
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
    store_zeros<kThreads, Config::kZerosByOneIndex>(
        row_of<Element>(params.grad_q, global_row, head), params.grad_q.row_stride, rows,
        params.dim_qk);
    return;
  }
  const bool copies = threadIdx.x == 0;
  if (copies) {
    copy_pair(shared.sQ, kernel_params.q, shared.sGradOut, kernel_params.grad_out, global_row, head,
              shared.barriers.own, Bias::table_bytes(params.bias));
  }
  const RowRange kv = used_rows(params, tile.seq);
  const int num_keys = static_cast<int>(kv.len);
  const WindowOf<int> window = sequence_window(params, num_keys - num_queries);
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
  const auto finish_bias = [&](int stage) {
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
      zero_tile_rows<kThreads>(shared.sK[stage], num_keys - key, kStep, threadIdx.x);
      ptx::fence_proxy_async();
      if constexpr (Config::kOverlapsSteps) __syncthreads();
    }
    finish_bias(stage);
    // The step before is done with the other stage.
    if constexpr (!Config::kOverlapsSteps) __syncthreads();
    Accumulator<1, kScoreBlocks> s, dp;
    ptx::wgmma_fence();
    start_scores_and_grad_probs(s, shared.sQ, shared.sK[stage], dp, shared.sGradOut,
                                shared.sV[stage]);
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
      replace_by_slopes<Config>(s, scale_of_logits);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
      multiply_by_slopes<Config>(s, dp, slope_factor);
    } else {
      exponentiate_rows<Config>(s, scale_of_logits, lse_log2);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
      multiply_rows(s, dp, delta);
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
    const __grid_constant__ BackwardOperands params) {
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
    const __grid_constant__ BackwardOperands params) {
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

}  // namespace jagged_cuda::attention
