// dK and dV of the backward pass with ranges, biases or silu (ranged_backward.cuh), and the
// gradient of kv_bias. For each head of the group and each step of queries that see some of the
// tile's keys:
//     start S^T = K Q^T, dP^T = V dO^T
//     copy Q and dO, lse and delta or factors, and the biases, of the next step
//     softmax: P^T = exp2(...)                             silu: P^T and slopes x
//     zeros where a query does not see a key
//     start dV += P^T dO
//     softmax: dS^T = P^T * (dP^T - delta)                 silu: dS^T = (1 + x) dP^T
//     add dS^T to the sums of keys
//     start dK += dS^T Q
#pragma once

#include "cuda/kernels/attention/ranged_backward_tile.cuh"
#include "cuda/kernels/attention/visible.cuh"

namespace jagged_cuda::attention {

template <typename Config>
struct RangedDkdvStorage : DkdvWgmmaStorage<Config> {
  LogitStep<Config::kBias> sBias[2];
  LogitTable<Config::kBias> bias_table;
  KeyOfLane<Config::kBias> keys[Config::kThreads];
  CopyBarriers barriers;
};
// --- verbs: columns are queries; `factors`, `lse` and `delta` are those of a step, in shared memory

// Asks for lse and delta, or for the factors of queries, of a step from row `first` of q on, of
// which `valid` rows exist, and commits all that this thread has asked for of the step.
template <typename Config>
__device__ __forceinline__ void load_statistics(RangedDkdvStorage<Config>& shared,
                                                const AttentionBackwardParams& params,
                                                bool has_factors, int64_t first, int valid,
                                                int head, int stage) {
  const int r = static_cast<int>(threadIdx.x);
  if ((Config::kSilu && !has_factors) || r >= Config::kStep) {
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
}
// lse of a step in units of log2, each by the thread that asked for it.
template <typename Config>
__device__ __forceinline__ void convert_lse(float* of_step, int valid) {
  if (!Config::kSilu && threadIdx.x < Config::kStep) {
    float& lse = of_step[threadIdx.x];
    lse = Config::kBiased ? lse_in_log2(lse, kMostLse) : lse * kLog2E;
    // P of queries past the end is 0, whatever their bias.
    if (Config::kBiased && static_cast<int>(threadIdx.x) >= valid) lse = INFINITY;
  }
}
// silu of scores, or logits, times the factors of their queries if kFactors, to p; s becomes the
// slopes.
template <typename Config, bool kFactors, typename Packed, int kBlocks>
__device__ __forceinline__ void activate(Accumulator<1, kBlocks>& s, Packed& p,
                                         float scale_of_logits, const float* factors, int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    float2 factor = {1.0f, 1.0f};
    if constexpr (kFactors) factor = columns_of_lane(factors, block, lane);
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
}
// P^T = exp2(...)
template <typename Config, int kBlocks>
__device__ __forceinline__ void exponentiate_columns(Accumulator<1, kBlocks>& s,
                                                     float scale_of_logits, const float* lse_log2,
                                                     int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float2 lse = columns_of_lane(lse_log2, block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float z = Config::kBiased ? s[0][block][i] : s[0][block][i] * scale_of_logits;
      s[0][block][i] = ptx::ex2_approx(z - (i % 2 == 0 ? lse.x : lse.y));
    }
  }
}
// dP^T of silu times the factors of its queries.
template <int kBlocks>
__device__ __forceinline__ void multiply_by_factors(Accumulator<1, kBlocks>& dp,
                                                    const float* factors, int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float2 factor = columns_of_lane(factors, block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) dp[0][block][i] *= i % 2 == 0 ? factor.x : factor.y;
  }
}
// dS^T = P^T * (dP^T - delta), to s.
template <int kBlocks>
__device__ __forceinline__ void multiply_columns(Accumulator<1, kBlocks>& s,
                                                 const Accumulator<1, kBlocks>& dp,
                                                 const float* deltas, int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float2 delta = columns_of_lane(deltas, block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[0][block][i] *= dp[0][block][i] - (i % 2 == 0 ? delta.x : delta.y);
  }
}

// --- the kernel

// kSums: with the gradient of kv_bias.
template <typename Config, bool kSums>
__global__ __launch_bounds__(Config::kThreads, Config::kDkdvCtas) void ranged_dkdv(
    const __grid_constant__ BackwardOperands kernel_params) {
  const AttentionBackwardParams& params = kernel_params.attention;
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<RangedDkdvStorage<Config>*>(wgmma_shared_bytes);

  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
  // The tile: `rows` used keys from tile.row on, `stored` in all; `queries` are the rows of q in
  // the same sequence.
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
    store_zeros<kThreads, Config::kZerosByOneIndex>(gGradK + rows * params.grad_k.row_stride,
                                                    params.grad_k.row_stride, stored - rows,
                                                    params.dim_qk);
    store_zeros<kThreads, Config::kZerosByOneIndex>(gGradV + rows * params.grad_v.row_stride,
                                                    params.grad_v.row_stride, stored - rows,
                                                    params.dim_v);
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
  const WindowOf<int> window = sequence_window(params, num_keys - num_queries);
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
    load_statistics<Config>(shared, params, has_factors, first, valid, head, stage);
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
      zero_tile_rows<kThreads>(shared.sQ[stage], valid, kStep, threadIdx.x);
      zero_tile_rows<kThreads>(shared.sGradOut[stage], valid, kStep, threadIdx.x);
      ptx::fence_proxy_async();
    }
    if (!Config::kSilu || has_factors || kLoadsBias) {
      ptx::cp_async_wait<0>();
      convert_lse<Config>(shared.sLse[stage], valid);
    }
    __syncthreads();                     // the step before is done with the other stage
    Accumulator<1, kScoreBlocks> s, dp;  // S^T and dP^T
    ptx::wgmma_fence();
    auto& operands = uniform<Config>(shared);
    start_scores_and_grad_probs(s, operands.sK, operands.sQ[stage], dp, operands.sV,
                                operands.sGradOut[stage]);
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
      if (has_factors) {
        activate<Config, true>(s, p, scale_of_logits, shared.sDelta[stage], lane);
      } else {
        activate<Config, false>(s, p, scale_of_logits, shared.sDelta[stage], lane);
      }
      if (is_cut) seen.keep(p, s, SiluOf::kNoSlope, lane);
    } else {
      exponentiate_columns<Config>(s, scale_of_logits, shared.sLse[stage], lane);
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
      if (has_factors) multiply_by_factors(dp, shared.sDelta[stage], lane);
      multiply_by_slopes<Config>(s, dp, slope_factor);
    } else {
      multiply_columns(s, dp, shared.sDelta[stage], lane);
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
          __syncthreads();  // all are done with the table before
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

}  // namespace jagged_cuda::attention
