// dQ of the backward pass for wide heads (wide_backward.cuh says how), and delta for wide_dkdv.
// Items are tiles of 128 queries of one head; each computing warpgroup has 64 of them.
//
//     copier (one thread)              each computing warpgroup
//     for each item:                   for each item:
//       K of the first tile, Q, dO       lse and delta of its rows
//       for each tile of 64 keys:        for each tile of 64 keys:
//         V, K of the next tile            start S = Q K^T, behind dQ of the tile before
//                                          start dP = dO V^T
//                                          P = exp2(...), dS = P * (dP - delta), in registers
//                                          start dQ += dS K
//                                        store dQ
//
// Shared memory, in tiles of 64 rows of 512 bytes: Q and dO of each warpgroup, K in 2 stages, V in
// one: 224 KiB (192 dims: a stage more of each, 216).
//
// Barriers:               arrives                                waits
//     items.full          scheduler                              copier, computing warps
//     items.empty         copier, computing warps                scheduler
//     q_full[w]           copier, with Q and dO of a warpgroup   warpgroup w
//     q_empty[w]          warpgroup w, after its last dP         copier
//     keys.full           copier, with K                         computing warps
//     keys.empty          computing warps, after their dQ        copier
//     values.full         copier, with V                         computing warps
//     values.empty        computing warps, after their dP        copier
//     kZeroed + w         warpgroup w                            the same, after it wrote zeros
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_items.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/wide_tile.cuh"

namespace jagged_cuda::attention {

template <typename Config>
struct WideDqStorage {
  using Element = typename Config::Element;
  using Tile = WarpgroupTile<Element, Config::kRows, Config::kDim>;
  static constexpr int kItems = 2;
  Tile sQ[Config::kWarpgroups], sGradOut[Config::kWarpgroups];
  Tile sK[Config::kKeyStages], sV[Config::kValueStages];
  WorkItem item[kItems];
  Ring<kItems> items;
  Ring<Config::kKeyStages> keys;
  Ring<Config::kValueStages> values;
  uint64_t q_full[Config::kWarpgroups], q_empty[Config::kWarpgroups];
};
static_assert(sizeof(WideDqStorage<WideBackwardConfig<__half, 192>>) <= 227 * 1024);
static_assert(sizeof(WideDqStorage<WideBackwardConfig<__half, 256>>) <= 227 * 1024);

// Copies what the items need, in the order of its use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_for_dq(const BackwardOperands& params,
                                            WideDqStorage<Config>& shared) {
  using Storage = WideDqStorage<Config>;
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kKeyStages> keys;
  RingPosition<Config::kValueStages> values;
  unsigned q_parities = ~0u;  // one bit per warpgroup
  for (;;) {
    shared.items.wait(place);
    const WorkItem item = shared.item[place.stage];
    shared.items.release(place.advance());
    if (item.is_end) return;
    const QueryTile& tile = item.tile;
    const KeyRange range(tile, window_of(attention, tile), Config::kRows);
    if (range.first >= range.last) continue;
    const int kv_head = item.head / group;
    const auto copy_keys = [&](int key) {
      shared.keys.acquire(keys);
      copy_tile(shared.sK[keys.stage], params.k, tile.key_begin + key, kv_head,
                shared.keys.full[keys.stage]);
      keys.advance();
    };
    copy_keys(range.first);
    for (int w = 0; w < Config::kWarpgroups && w * Config::kRows < tile.rows; ++w) {
      ptx::mbarrier_wait(shared.q_empty[w], q_parities >> w & 1);
      q_parities ^= 1u << w;
      const int64_t row = tile.global_row + w * Config::kRows;
      copy_pair(shared.sQ[w], params.q, shared.sGradOut[w], params.grad_out, row, item.head,
                shared.q_full[w]);
    }
    for (int key = range.first; key < range.last; key += Config::kRows) {
      shared.values.acquire(values);
      copy_tile(shared.sV[values.stage], params.v, tile.key_begin + key, kv_head,
                shared.values.full[values.stage]);
      values.advance();
      if (key + Config::kRows < range.last) copy_keys(key + Config::kRows);
    }
  }
}

// delta of one row, of which each lane of a quad sums every fourth chunk of 8 elements.
template <typename Element>
__device__ __forceinline__ float row_delta(const AttentionBackwardParams& params, int64_t row,
                                           int head, bool valid, int lane) {
  float sum = 0.0f;
  if (valid) {
    const Element* out = row_of<Element>(params.out, row, head);
    const Element* grad_out = row_of<Element>(params.grad_out, row, head);
#pragma unroll 4
    for (int column = lane % 4 * 8; column < params.dim_v; column += 32) {
      const uint4 a_chunk = *reinterpret_cast<const uint4*>(out + column),
                  b_chunk = *reinterpret_cast<const uint4*>(grad_out + column);
      const Element* a = reinterpret_cast<const Element*>(&a_chunk);
      const Element* b = reinterpret_cast<const Element*>(&b_chunk);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += static_cast<float>(a[e]) * static_cast<float>(b[e]);
    }
  }
  sum = quad_sum(sum);
  if (valid && params.grad_lse != nullptr)
    sum -= static_cast<const float*>(params.grad_lse)[row * params.heads + head];
  return sum;
}

// A warpgroup that computes dq of 64 rows of each item.
template <typename Config>
struct WideDqConsumer {
  using Element = typename Config::Element;
  using Storage = WideDqStorage<Config>;
  static constexpr int kRows = Config::kRows, kScoreBlocks = kRows / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kZeroedBarrier = 1;

  const AttentionBackwardParams& attention;
  Storage& shared;
  const int warpgroup, lane, own_row;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kKeyStages> keys;
  RingPosition<Config::kValueStages> values;
  int q_parity = 0;

  __device__ __forceinline__ WideDqConsumer(const AttentionBackwardParams& params, Storage& storage,
                                            int own_warpgroup)
      : attention(params),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(threadIdx.x % 32),
        own_row(own_warpgroup * kRows + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(uint64_t& barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // Waits for K of the keys from `key` on; rows past the end become zeros.
  __device__ __forceinline__ int wait_for_keys(int rows) {
    shared.keys.wait(keys);
    const int stage = keys.advance();
    if (rows < kRows) {
      zero_rows(shared.sK[stage], rows);
      ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
    }
    return stage;
  }
  // S = Q K^T
  __device__ __forceinline__ void start_scores(Accumulator<1, kScoreBlocks>& s, int stage) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sQ[warpgroup], 0, shared.sK[stage]);
    ptx::wgmma_commit_group();
  }

  // dP = dO V^T
  __device__ __forceinline__ void start_grad_probs(Accumulator<1, kScoreBlocks>& dp, int stage) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(dp, shared.sGradOut[warpgroup], 0, shared.sV[stage]);
    ptx::wgmma_commit_group();
  }
  // P = exp2(...)
  __device__ __forceinline__ static void finish_scores(Accumulator<1, kScoreBlocks>& s,
                                                       float scale_log2,
                                                       const float (&lse_log2)[2]) {
    ptx::fence_operands(s[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] = ptx::ex2_approx(__fmaf_rn(s[0][block][i], scale_log2, -lse_log2[i / 2]));
    }
  }
  // dS = P * (dP - delta), to s.
  __device__ __forceinline__ static void finish_grad_probs(Accumulator<1, kScoreBlocks>& s,
                                                           const Accumulator<1, kScoreBlocks>& dp,
                                                           const float (&delta)[2]) {
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][block][i] *= dp[0][block][i] - delta[i / 2];
    }
  }
  // dQ += dS K
  __device__ __forceinline__ void start_grad_q(Accumulator<1, kOutBlocks>& dq,
                                               const Accumulator<1, kScoreBlocks>& s, int stage) {
    const PackedRows<Element, kScoreBlocks> ds(s);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dq, ds, shared.sK[stage]);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void run_keys(const QueryTile& tile, const KeyRange& range,
                                           const float (&lse_log2)[2], const float (&delta)[2],
                                           Accumulator<1, kOutBlocks>& dq) {
    const WindowOf<int> window = window_of(attention, tile);
    const float scale_log2 = static_cast<float>(attention.scale) * kLog2E;
    const int last_key = own_last_key(tile, window, range, warpgroup * kRows);
    int last = -1;  // the stage of K whose product is in flight
    ptx::mbarrier_wait(shared.q_full[warpgroup], q_parity);
    q_parity ^= 1;
    int key = range.first;
    for (; key < last_key; key += kRows) {
      const int stage = wait_for_keys(tile.num_keys - key);
      Accumulator<1, kScoreBlocks> s, dp;
      start_scores(s, stage);
      ptx::wgmma_wait_group<1>();
      ptx::fence_operands(dq[0]);
      if (last >= 0) arrive(shared.keys.empty[last]);
      last = stage;
      shared.values.wait(values);
      const int value_stage = values.advance();
      start_grad_probs(dp, value_stage);
      ptx::wgmma_wait_group<1>();
      finish_scores(s, scale_log2, lse_log2);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
      arrive(shared.values.empty[value_stage]);
      if (key + kRows >= last_key) arrive(shared.q_empty[warpgroup]);
      finish_grad_probs(s, dp, delta);
      if (window.cuts_tile(tile.row + warpgroup * kRows, kRows, key, kRows, tile.num_keys))
        replace_unseen(s, 0.0f, window, tile.row + own_row, key, tile.num_keys, lane);
      start_grad_q(dq, s, stage);
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq[0]);
    arrive(shared.keys.empty[last]);
    skip_keys(key, range.last);
  }
  // Passes over keys that this warpgroup does not see.
  __device__ __forceinline__ void skip_keys(int key, int last) {
    for (; key < last; key += kRows) {
      shared.keys.wait(keys);
      arrive(shared.keys.empty[keys.advance()]);
      shared.values.wait(values);
      arrive(shared.values.empty[values.advance()]);
    }
  }

  // lse and delta of this lane's two rows; delta is left behind for wide_dkdv.
  __device__ __forceinline__ void find_statistics(float (&lse_log2)[2], float (&delta)[2],
                                                  const QueryTile& tile, int head) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = own_row + 8 * half < tile.rows;
      const int64_t row = tile.global_row + own_row + 8 * half,
                    statistic = row * attention.heads + head;
      lse_log2[half] = valid ? static_cast<const float*>(attention.lse)[statistic] * kLog2E : 0.0f;
      delta[half] = row_delta<Element>(attention, row, head, valid, lane);
      if (valid && lane % 4 == 0) static_cast<float*>(attention.delta)[statistic] = delta[half];
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const QueryTile tile = shared.item[stage].tile;
      const int head = shared.item[stage].head;
      if (shared.item[stage].is_end) return;
      __syncwarp();
      arrive(shared.items.empty[stage]);
      const KeyRange range(tile, window_of(attention, tile), kRows);
      if (warpgroup * kRows >= tile.rows) {
        skip_keys(range.first, range.last);
        continue;
      }
      const int64_t global_row = tile.global_row + own_row;
      float lse_log2[2], delta[2];
      find_statistics(lse_log2, delta, tile, head);
      Accumulator<1, kOutBlocks> dq = {};
      if (range.first < range.last) run_keys(tile, range, lse_log2, delta, dq);
      const float scale = static_cast<float>(attention.scale), scales[2] = {scale, scale};
      store_quads(dq, scales, row_of<Element>(attention.grad_q, global_row, head),
                  attention.grad_q.row_stride, tile.rows - own_row, attention.dim_qk, lane);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void wide_dq(const __grid_constant__ BackwardOperands params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<WideDqStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    shared.items.init(kConsumerWarps + 1);
    shared.keys.init(kConsumerWarps);
    shared.values.init(kConsumerWarps);
    for (uint64_t& barrier : shared.q_full) ptx::mbarrier_init(barrier, 1);
    for (uint64_t& barrier : shared.q_empty) ptx::mbarrier_init(barrier, 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) schedule<Config>(params.attention, shared);
    if (threadIdx.x == 32) copy_for_dq<Config>(params, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    WideDqConsumer<Config>(params.attention, shared, warpgroup - 1).run();
  }
}

}  // namespace jagged_cuda::attention
