// Backward of jagged_flash_attention for head dims of 65 to 128 on wgmma and TMA (compute capability 9.0),
// 16-bit elements, where there are few tiles: a CTA for each. (Of many, backward_items.cuh is faster.)
// Mathematics, kernels and grid are those of backward_wgmma.cuh.
//
// Four warps compute 16 rows each; the first thread copies, too:
//
//     dq                                            dkdv
//     for each step j, 64 keys:                     for each step j, 64 queries of a head:
//       start S = Q K_j^T, dQ += dS_{j-1} K_{j-1},    start S^T = K Q_j^T, dP^T = V dO_j^T
//             dP = dO V_j^T                           copy Q_{j+1}, dO_{j+1}, lse, delta
//       copy K_{j+1}, V_{j+1}                         P^T = exp2(...), start dV += P^T dO_j
//       P = exp2(...), dS = P * (dP - delta)          dS^T = P^T * (dP^T - delta), dK += dS^T Q_j
//
// Shared memory, in tiles of 64 rows of 256 bytes: Q, dO, three of K, two of V: 112 KiB; K, V, two of Q and
// of dO, lse and delta: 97 KiB. Gradients leave through Q, or K and V.
//
// Barriers: own_full and full[stage] complete with the bytes of a copy (and, of dkdv's statistics, with
// each thread's cp.async). One __syncthreads per step: all have finished the step before, whose places are
// filled next. A barrier of the CTA before gradients leave.
//
// A copy may reach into the next sequence: rows of K (dq), of Q and dO (dkdv) past the end are overwritten
// with zeros, since 0 times NaN is NaN; what other rows bring there is masked, or not stored.
#pragma once

#include "cuda/kernels/attention/backward_bulk_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_>
struct BulkBackwardConfig {
  using Element = Element_;
  static constexpr int kThreads = 128, kMinCtas = 2;
  static constexpr PathName kName = PathName("cuda.attention.backward.wgmma.d") + kBulkDim;
};

template <typename Element>
struct DqBulkStorage {
  BulkTile<Element> sQ, sGradOut, sK[3], sV[2];
  uint64_t own_full, keys_full[3], values_full[2];
};

template <typename Element>
struct DkdvBulkStorage {
  BulkTile<Element> sK, sV, sQ[2], sGradOut[2];
  StepStatistics statistics[2];
  uint64_t own_full, full[2];
};

template <typename Config>
__device__ __forceinline__ void backward_dq_of_item(const BulkBackwardParams& params,
                                                    DqBulkStorage<typename Config::Element>& shared,
                                                    const BulkItem<false>& item) {
  using Element = typename Config::Element;
  const AttentionBackwardParams& attention = params.attention;
  const BulkThread own(attention, threadIdx.x, 1);
  if (item.seq < 0) {
    zero_gradient<Element>(attention.grad_q, item.global_row, item.head, item.rows,
                           attention.dim_qk, own.thread);
    return;
  }
  const int kv_head = item.head / (attention.heads / attention.kv_heads);
  const auto copy_keys = [&](int step, int k_stage) {
    const int64_t key = item.other_begin + item.first + step * kBulkRows;
    copy_tile(shared.sK[k_stage], params.k, key, kv_head, shared.keys_full[k_stage]);
    copy_tile(shared.sV[step % 2], params.v, key, kv_head, shared.values_full[step % 2]);
  };
  if (own.thread == 0) {
    copy_pair(shared.sQ, params.q, shared.sGradOut, params.grad_out, item.global_row, item.head,
              shared.own_full);
    for (int step = 0; step < min(item.steps, 2); ++step) copy_keys(step, step);
  }
  __syncwarp();
  QueryStatistics<Element> statistics(attention, item.global_row, item.head, item.rows, own.thread);
  ptx::mbarrier_wait(shared.own_full, 0);
  statistics.sum_delta(shared.sGradOut);

  const WindowOf<int> window = item.window(attention);
  BulkSums dq = {};
  BulkScores s, dp;
  PackedRows<Element, kBulkRows / 8> ds;
  int k_stage = 0, k_parity = 0, last_k_stage = 0;
  for (int step = 0; step < item.steps; ++step) {
    const int key = item.first + step * kBulkRows, stage = step % 2,
              next_k_stage = k_stage == 2 ? 0 : k_stage + 1;
    auto& sK = shared.sK[k_stage];
    ptx::mbarrier_wait(shared.keys_full[k_stage], k_parity);
    if (key + kBulkRows > item.num_other) own.zero_rows_from(sK, item.num_other - key);
    __syncthreads();
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    wgmma_rows_by_rows<0, true>(s, shared.sQ, 0, sK);
    ptx::wgmma_commit_group();
    ptx::wgmma_fence();
    if (step > 0) wgmma_packed_by_columns<true>(dq, ds, shared.sK[last_k_stage]);
    ptx::wgmma_commit_group();
    ptx::mbarrier_wait(shared.values_full[stage], step / 2 % 2);
    wgmma_rows_by_rows<0, true>(dp, shared.sGradOut, 0, shared.sV[stage]);
    ptx::wgmma_commit_group();
    if (own.thread == 0 && step > 0 && step + 1 < item.steps) copy_keys(step + 1, next_k_stage);
    __syncwarp();
    ptx::wgmma_wait_group<2>();
    ptx::fence_operands(s[0]);
    statistics.exponentiate(s, own.scale_log2);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dp[0]);
    ptx::fence_operands(dq[0]);
    statistics.multiply(s, dp);
    if (window.cuts_tile(item.row, kBulkRows, key, kBulkRows, item.num_other))
      replace_unseen(s, 0.0f, window, item.row + own.warp_row + own.lane / 4, key, item.num_other,
                     own.lane);
    ds = PackedRows<Element, kBulkRows / 8>(s);
    last_k_stage = k_stage;
    if (next_k_stage == 0) k_parity ^= 1;
    k_stage = next_k_stage;
  }
  if (item.steps > 0) {
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(dq, ds, shared.sK[last_k_stage]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq[0]);
  }
  // No warp's product reads Q any more.
  ptx::bar_sync(own.barrier, Config::kThreads);
  send_gradient<Element>(shared.sQ, own.warp_row, params.grad_q, attention.grad_q, dq, own.scale,
                         item.global_row, item.head, item.rows, attention.dim_qk, own.lane);
  if (own.lane == 0) ptx::cp_async_bulk_wait_read();
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dq_bulk(
    const __grid_constant__ BulkBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DqBulkStorage<typename Config::Element>*>(wgmma_shared_bytes);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.own_full, 1);
    for (uint64_t& full : shared.keys_full) ptx::mbarrier_init(full, 1);
    for (uint64_t& full : shared.values_full) ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();
  const BulkItem<false> item(params.attention,
                             find_any_tile<kBulkRows>(params.attention.q_offsets, blockIdx.x),
                             blockIdx.y);
  __syncthreads();
  if (item.rows > 0) backward_dq_of_item<Config>(params, shared, item);
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_longer
}

template <typename Config>
__device__ __forceinline__ void backward_dkdv_of_item(
    const BulkBackwardParams& params, DkdvBulkStorage<typename Config::Element>& shared,
    const BulkItem<true>& item) {
  using Element = typename Config::Element;
  const AttentionBackwardParams& attention = params.attention;
  const BulkThread own(attention, threadIdx.x, 1);
  if (item.seq < 0) return KeySums<Element>::zero(own, attention, item);
  QuerySteps next(attention, item);
  // A step's queries, and what belongs to them; one thread, and all.
  const auto copy_queries = [&](int stage) {
    copy_pair(shared.sQ[stage], params.q, shared.sGradOut[stage], params.grad_out,
              item.other_begin + next.query, next.head, shared.full[stage]);
  };
  const auto copy_statistics = [&](int stage) {
    shared.statistics[stage].copy(attention, own.thread, item.other_begin + next.query, next.head,
                                  item.num_other - next.query);
    ptx::cp_async_mbarrier_arrive(shared.full[stage]);
    next.advance();
  };
  if (own.thread == 0) {
    copy_pair(shared.sK, params.k, shared.sV, params.v, item.global_row, item.head,
              shared.own_full);
    if (item.steps > 0) copy_queries(0);
  }
  __syncwarp();
  if (!attention.dkdv_is_last) ptx::griddepcontrol_wait();  // for delta
  int query = next.query;
  if (item.steps > 0) copy_statistics(0);

  const WindowOf<int> window = item.window(attention);
  KeySums<Element> sums;
  ptx::mbarrier_wait(shared.own_full, 0);
  for (int step = 0; step < item.steps; ++step) {
    const int stage = step % 2, next_query = next.query;
    auto& sQ = shared.sQ[stage];
    auto& sGradOut = shared.sGradOut[stage];
    ptx::mbarrier_wait(shared.full[stage], step / 2 % 2);
    if (query + kBulkRows > item.num_other) {
      own.zero_rows_from(sQ, item.num_other - query);
      own.zero_rows_from(sGradOut, item.num_other - query);
    }
    __syncthreads();
    const auto copy_next = [&] {
      if (step + 1 == item.steps) return;
      if (own.thread == 0) copy_queries(stage ^ 1);
      __syncwarp();
      copy_statistics(stage ^ 1);
    };
    sums.add(own, item, window, query, shared.sK, shared.sV, sQ, sGradOut, shared.statistics[stage],
             copy_next, [] {});
    query = next_query;
  }
  __syncthreads();  // no warp's product reads K and V any more
  sums.send(own, params, item, shared.sV, shared.sK);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dkdv_bulk(
    const __grid_constant__ BulkBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DkdvBulkStorage<typename Config::Element>*>(wgmma_shared_bytes);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.own_full, 1);
    for (uint64_t& full : shared.full) ptx::mbarrier_init(full, 1 + Config::kThreads);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();  // the plan of the kernel for long sequences
  const BulkItem<true> item(params.attention,
                            find_any_tile<kBulkRows>(params.attention.kv_offsets, blockIdx.x),
                            blockIdx.y);
  __syncthreads();
  if (item.rows > 0) backward_dkdv_of_item<Config>(params, shared, item);
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
}

template <typename Element>
cudaError_t launch_dq_bulk(const BulkBackwardParams& params, bool is_behind, cudaStream_t stream) {
  using Config = BulkBackwardConfig<Element>;
  const AttentionBackwardParams& attention = params.attention;
  return launch_behind<backward_dq_bulk<Config>>(
      is_behind || attention.split_by_length, params,
      tile_grid(attention, attention.q_offsets, kBulkRows, attention.heads), Config::kThreads,
      sizeof(DqBulkStorage<Element>), stream, Config::kName);
}

template <typename Element>
cudaError_t launch_dkdv_bulk(const BulkBackwardParams& params, cudaStream_t stream) {
  using Config = BulkBackwardConfig<Element>;
  const AttentionBackwardParams& attention = params.attention;
  return launch_dependent<backward_dkdv_bulk<Config>>(
      params, tile_grid(attention, attention.kv_offsets, kBulkRows, attention.kv_heads),
      Config::kThreads, sizeof(DkdvBulkStorage<Element>), stream);
}

}  // namespace jagged_cuda::attention
