// Backward of jagged_flash_attention for head dims of 129 to 256 on wgmma and TMA (compute
// capability 9.0), 16-bit elements. With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO *
// O) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// Two kernels, each behind a plan of its own (long_plan.cuh): wide_dq, whose items are tiles of
// 128 queries and which leaves delta behind, then wide_dkdv, whose items are tiles of 64 keys. Both
// recompute S and dP: seven products, but no atomics and the same bits at every run.
//
// Grid: one CTA per SM, which takes items until there are no more. A CTA has a warpgroup of
// producers and two that compute. Registers bind: 64 rows of 256 sums take 128 of a thread's.
//
// wide_dq: each warpgroup computes 64 queries. For each tile of 64 keys:
//     start S = Q K^T, behind dQ of the tile before
//     start dP = dO V^T;  P = exp2(...), dS = P * (dP - delta), rounded, in registers
//     start dQ += dS K
// Shared memory, in tiles of 64 rows of 512 bytes: Q and dO of each warpgroup, K in 2 stages, V in
// one: 224 KiB (192 dims: a stage more of each, 216).
//
// wide_dkdv: one warpgroup computes dV, the other dK, of the same 64 keys. For each step of 64
// queries of a head of the group:
//     the first                                   the second
//     start S^T = K Q^T, behind the last dV       start dP^T = V dO^T, behind the last dK
//     P^T = exp2(...), to shared memory     ->    dS^T = P^T * (dP^T - delta)
//     start dV += P^T dO                          start dK += dS^T Q
// P^T passes from thread to thread, since both hold the same elements of a product. Shared memory:
// K, V; Q and dO in 2 stages (192 dims: 3); P^T in f32, twice: 224 KiB, 1 more for lse and delta.
//
// Barriers:               arrives                                waits
//     items.full          scheduler                              copiers, computing warps
//     items.empty         copiers, computing warps               scheduler
//     q_full[w]           copier, with Q and dO of a warpgroup   warpgroup w
//     q_empty[w]          warpgroup w, after its last dP         copier
//     keys, values        as ring: full and empty of K, of V     as ring
//     tile_full[w]        copier, with K (w = 0), V (w = 1)      warpgroup w
//     tile_empty[w]       warpgroup w, after its last S or dP    copier
//     ring.full           copier, with Q and dO; statistics      both warpgroups
//     ring.empty          both warpgroups, after their products  copier, statistics
//     probs.full          threads of the first, P is written     the second
//     probs.empty         threads of the second, P is read       the first
//     kZeroed + w         warpgroup w                            the same, after it wrote zeros
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
    error = launch_planning<kDq>(attention, params, dq_grid, Config::kThreads, kDqBytes, stream,
                                 Config::kName);
  } else {
    AttentionBackwardParams of_keys = attention;
    of_keys.long_plan = static_cast<char*>(attention.long_plan) + long_plan_bytes(num_seqs);
    error = launch_plan<Config::kTileM, AttentionParams>(attention, stream);
    if (error != cudaSuccess) return error;
    error = launch_dependent<plan_long<Config::kRows, AttentionBackwardParams>>(
        of_keys, Grid{1}, kPlanThreads, 0, stream);
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
