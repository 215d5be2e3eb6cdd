// Backward of attention with ranges of keys, unused keys or biases, and of jagged_hstu_attention,
// on wgmma and TMA (compute capability 9.0), 16-bit elements. Mathematics and sums are those of
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
// Biases (logit_bias.cuh) make z = scale S + bias. The gradient of a kv_bias is the sum of dS of a
// key over the queries, which ranged_dkdv has in registers.
//
// Masks. Window and ranges are two intervals of keys for each query. ranged_dq walks over the steps
// of keys that some query of its tile sees, and masks one only where a query of a warp does not see
// all of it. ranged_dkdv finds the tiles of queries that see some of its keys by their bounds, 32
// at a time, and masks those that do not see all.
//
// Shared memory, in rows of 2 kDim bytes: dq: Q and dO kRows, K and V kStep in 2 stages each; dkdv:
// K and V kRows, Q and dO kStep in 2 stages each, lse and delta, or factors; 48 KiB for 64 dims and
// 96 for 128 (dkdv 1 more), and with times 7 more, so that four CTAs of dq with 64 dims fill an SM;
// with the gradients of tables 8 more and the sums. Gradients leave through the rows of Q, or of K
// and V.
//
// Barriers:            arrives                                  waits
//     own              thread 0, with the bytes of the CTA's    all threads
//                      own rows, and of a table of times
//     full[stage]      thread 0, with the bytes of a step       all threads
//     __syncthreads    all, once per step: the step before, whose stage is filled next, is done, and
//                      zeros and 4-byte copies have been written. Where steps overlap in dq it is
//                      behind the start of S, and zeros have one of their own. One more before
//                      gradients leave.
//
// A copy may reach into the next sequence. What is summed over its rows gets zeros there, since 0
// times NaN is NaN: K in dq, Q and dO in dkdv. V in dq does not: dS is replaced behind it. A CTA's
// own rows past the end make rows of gradients that are not stored. Rows outside all sequences get
// zeros, and so do keys that are not used or that nobody sees.
//
// Files: what both kernels use: ranged_backward_tile.cuh; the kernels: ranged_bounds.cuh,
// ranged_dq.cuh, ranged_dkdv.cuh; their launches: here.
#pragma once

#include "cuda/kernels/attention/ranged_bounds.cuh"
#include "cuda/kernels/attention/ranged_dkdv.cuh"
#include "cuda/kernels/attention/ranged_dq.cuh"

#include <algorithm>

namespace jagged_cuda::attention {

template <typename Config>
cudaError_t launch_ranged_tables(const BackwardOperands& params, cudaStream_t stream) {
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
  BackwardOperands params;
  params.attention = attention;
  const OffsetsView &q_offsets = attention.q_offsets, &kv_offsets = attention.kv_offsets;
  cudaError_t error = params.template encode<Tile, Tile>();
  if (error != cudaSuccess) return error;
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
  error = launch<find_tile_bounds<Config::kRows>>(
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

template <typename Element, int kDim>
cudaError_t launch_backward_ranged_dim(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto launch = [&](auto bias) {
    constexpr auto kBias = static_cast<BiasKind>(bias.value);
    return params.silu ? launch_ranged_backward<Element, kDim, true, kBias>(params, stream)
                       : launch_ranged_backward<Element, kDim, false, kBias>(params, stream);
  };
  switch (bias_kind(params.bias)) {
    case BiasKind::kNone:
      return launch(Constant<int(BiasKind::kNone)>{});
    case BiasKind::kKeys:
      return launch(Constant<int(BiasKind::kKeys)>{});
    case BiasKind::kPositions:
      return launch(Constant<int(BiasKind::kPositions)>{});
    case BiasKind::kTimes:
      return launch(Constant<int(BiasKind::kTimes)>{});
    default:
      return launch(Constant<int(BiasKind::kAny)>{});
  }
}

}  // namespace jagged_cuda::attention
