// Backward of jagged_flash_attention for head dims of 129 to 256 on wgmma and TMA (compute
// capability 9.0), 16-bit elements. With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO *
// O) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// Two kernels, each behind a plan of its own (long_plan.cuh):
//     wide_dq      (wide_dq.cuh)    items are tiles of 128 queries; leaves delta behind
//     wide_dkdv    (wide_dkdv.cuh)  items are tiles of 64 keys
// Both recompute S and dP: seven products, but no atomics and the same bits at every run.
//
// Grid of both: one CTA per SM, which takes items until there are no more. A CTA has a warpgroup of
// producers and two that compute. Registers bind: 64 rows of 256 sums take 128 of a thread's.
//
// A copy may reach into the next sequence. Rows that a product sums over are overwritten with zeros
// past the end, since 0 times NaN is NaN; others give rows that are not stored. Queries past the
// end, or that see nothing, have lse inf in wide_dkdv, so that P is 0. Rows outside all sequences,
// queries without keys and keys without queries are planned, too, and get zeros.
#pragma once

#include "cuda/kernels/attention/wide_dkdv.cuh"
#include "cuda/kernels/attention/wide_dq.cuh"

namespace jagged_cuda::attention {

template <typename Config>
cudaError_t launch_wide_backward(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Tile = typename WideDqStorage<Config>::Tile;
  BackwardOperands params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total,
                num_seqs = attention.q_offsets.num_seqs;
  int num_sms = 0;
  cudaError_t error = params.template encode<Tile, Tile>();
  if (error == cudaSuccess) error = count_sms(num_sms);
  if (error != cudaSuccess) return error;
  const auto grid = [&](int64_t items) { return Grid{items < num_sms ? items : num_sms}; };
  const Grid dq_grid = grid(num_tiles(queries, num_seqs, Config::kTileM) * attention.heads),
             dkdv_grid = grid(num_tiles(keys, num_seqs, Config::kRows) * attention.kv_heads);
  constexpr auto kDq = wide_dq<Config>;
  constexpr int kDqBytes = sizeof(WideDqStorage<Config>);
  if (takes_own_plan(attention, attention.q_offsets, Config::kTileM, attention.heads, num_sms) &&
      takes_own_plan(attention, attention.kv_offsets, Config::kRows, attention.kv_heads, num_sms)) {
    params.attention.plans_itself = true;
    params.attention.planned = planned_lengths<AttentionParams>(attention);
    error = launch_planning<kDq>(attention, params, dq_grid, Config::kThreads, kDqBytes, stream,
                                 Config::kName);
    params.attention.planned = planned_lengths(attention);
  } else {
    AttentionBackwardParams of_keys = attention;
    of_keys.long_plan = static_cast<char*>(attention.long_plan) + long_plan_bytes(num_seqs);
    error =
        launch_plan<Config::kTileM, AttentionParams>(attention.split_by_length, attention, stream);
    if (error != cudaSuccess) return error;
    error = launch_plan<Config::kRows, AttentionBackwardParams>(true, of_keys, stream);
    if (error != cudaSuccess) return error;
    error =
        launch_dependent<kDq>(params, dq_grid, Config::kThreads, kDqBytes, stream, Config::kName);
    params.attention = of_keys;
  }
  if (error != cudaSuccess) return error;
  return launch_dependent<wide_dkdv<Config>>(params, dkdv_grid, Config::kThreads,
                                             sizeof(WideDkdvStorage<Config>), stream);
}

template <typename Element>
cudaError_t launch_backward_wide(const AttentionBackwardParams& params, cudaStream_t stream) {
  return params.dim_qk <= 192 && params.dim_v <= 192
             ? launch_wide_backward<WideBackwardConfig<Element, 192>>(params, stream)
             : launch_wide_backward<WideBackwardConfig<Element, 256>>(params, stream);
}

}  // namespace jagged_cuda::attention
