// dK and dV of the backward pass for wide heads (wide_backward.cuh says how). Items are tiles of 64
// keys of one kv head; one warpgroup computes dV, the other dK.
//
//     copier (one thread)        first warpgroup           second warpgroup
//     for each item:             for each item:            for each item:
//       K, V                       for each step:            for each step:
//       for each step (head of       start S^T = K Q^T         start dP^T = V dO^T
//       the group, 64 queries):      P^T = exp2(...)     ->    dS^T = P^T * (dP^T - delta)
//         Q, dO                      start dV += P^T dO        start dK += dS^T Q
//                                  store dV                  store dK
//     statistics (one warp): lse and delta of each step
//
// P^T passes from thread to thread by way of shared memory, since both hold the same elements of a
// product. S^T is started behind the last dV, dP^T behind the last dK.
//
// Shared memory, in tiles of 64 rows of 512 bytes: K, V; Q and dO in 2 stages (192 dims: 3); P^T in
// f32, twice: 224 KiB, 1 more for lse and delta.
//
// Barriers:               arrives                                waits
//     items.full          scheduler                              copier, statistics, computing warps
//     items.empty         copier, statistics, computing warps    scheduler
//     tile_full[w]        copier, with K (w = 0), V (w = 1)      warpgroup w
//     tile_empty[w]       warpgroup w, after its last S or dP    copier
//     ring.full           copier, with Q and dO; statistics      both warpgroups
//     ring.empty          both warpgroups, after their products  copier, statistics
//     probs.full          threads of the first, P is written     the second
//     probs.empty         threads of the second, P is read       the first
//     kZeroed + w         warpgroup w                            the same, after it wrote zeros
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/key_items.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/wide_tile.cuh"

namespace jagged_cuda::attention {

struct WideKeyItem {
  int64_t query_begin;  // in q
  int64_t key_begin;    // the tile, in k and v
  int key;              // the tile's first key within the sequence
  int keys;             // of the tile
  int num_queries;
  int num_keys;
  int kv_head;
  bool is_end;  // there are no more
};

template <typename Config>
struct WideDkdvStorage {
  using Element = typename Config::Element;
  using Tile = WarpgroupTile<Element, Config::kRows, Config::kDim>;
  static constexpr int kItems = 2, kProbsStages = 2;
  Tile sTile[2];  // K, V
  Tile sQ[Config::kStages], sGradOut[Config::kStages];
  float4 sProbs[kProbsStages][Config::kRows / 8][128];   // as they lie in registers
  float sStatistics[Config::kStages][2][Config::kRows];  // lse and delta
  WideKeyItem item[kItems];
  Ring<kItems> items;
  Ring<Config::kStages> ring;
  Ring<kProbsStages> probs;
  uint64_t tile_full[2], tile_empty[2];
};
static_assert(sizeof(WideDkdvStorage<WideBackwardConfig<__half, 192>>) <= 227 * 1024);
static_assert(sizeof(WideDkdvStorage<WideBackwardConfig<__half, 256>>) <= 227 * 1024);

// The queries that see a tile of keys, from a multiple of the step on.
template <int kStep>
struct WideSteps {
  WindowOf<int> window;  // of the keys over the queries
  int first, last;

  __device__ __forceinline__ WideSteps(const AttentionParams& params, const WideKeyItem& item)
      : window(queries_window(params, item)),
        first(window.first_column(item.key) / kStep * kStep),
        last(window.last_column(item.key, item.keys, item.num_queries)) {}
};

// Takes items from the plan, one ahead; one warp.
template <typename Config>
__device__ __forceinline__ void schedule_wide_keys(const AttentionParams& attention,
                                                   WideDkdvStorage<Config>& shared) {
  RingPosition<WideDkdvStorage<Config>::kItems> place;
  const auto publish = [&](const WideKeyItem& item) {
    publish_item(shared.items, place, shared.item, item);
  };
  const bool descending = keys_fall(attention);
  auto items = PlannedItems::of<Config::kRows, true>(attention, attention.kv_heads);
  PlannedSequence sequence;
  int64_t index;
  while (items.next(sequence, index)) {
    const bool outside = sequence.seq < 0;
    const RowRange kv = outside ? RowRange{sequence.begin, sequence.num_queries}
                                : planned_keys(attention, sequence);
    const int num_keys = static_cast<int>(kv.len);
    const int tiles = (num_keys + Config::kRows - 1) / Config::kRows;
    // Wrong offsets make a plan whose numbers overflow.
    if (index < 0 || index >= static_cast<int64_t>(tiles) * attention.kv_heads) continue;
    // Where late keys are seen by fewer queries, early ones come first, those of all heads.
    const bool by_tile = descending || attention.window_right < AttentionParams::kUnbounded;
    const int fastest = by_tile ? attention.kv_heads : tiles;
    const int slow = static_cast<int>(index / fastest), fast = static_cast<int>(index % fastest);
    const int tile = by_tile ? slow : fast;
    WideKeyItem item = {};
    item.key = (descending ? tiles - 1 - tile : tile) * Config::kRows;
    item.query_begin = sequence.begin;
    item.key_begin = kv.begin + item.key;
    item.keys = min(Config::kRows, num_keys - item.key);
    item.num_queries = outside ? 0 : sequence.num_queries;
    item.num_keys = num_keys;
    item.kv_head = by_tile ? fast : slow;
    publish(item);
  }
  WideKeyItem end = {};
  end.is_end = true;
  publish(end);
}

// Calls start(item) and then step(item, head, query, stage) for all steps of all items, each when
// its stage may be filled; the lane that `leads` releases items.
template <typename Config, typename Start, typename Step>
__device__ __forceinline__ void for_wide_steps(const AttentionParams& attention,
                                               WideDkdvStorage<Config>& shared, bool leads,
                                               Start start, Step step) {
  const int group = attention.heads / attention.kv_heads;
  RingPosition<WideDkdvStorage<Config>::kItems> place;
  RingPosition<Config::kStages> slot;
  for (;;) {
    shared.items.wait(place);
    const WideKeyItem item = shared.item[place.stage];
    __syncwarp(__activemask());  // all lanes that take part have read it
    const int stage = place.advance();
    if (leads) shared.items.release(stage);
    if (item.is_end) return;
    const WideSteps<Config::kRows> range(attention, item);
    if (range.first >= range.last) continue;
    start(item);
    for (int member = 0; member < group; ++member) {
      for (int query = range.first; query < range.last; query += Config::kRows) {
        shared.ring.acquire(slot);
        step(item, item.kv_head * group + member, query, slot.advance());
      }
    }
  }
}

// Copies K, V, Q and dO; one thread.
template <typename Config>
__device__ __forceinline__ void copy_for_dkdv(const BackwardOperands& params,
                                              WideDkdvStorage<Config>& shared) {
  int parity = 1;
  for_wide_steps<Config>(
      params.attention, shared, true,
      [&](const WideKeyItem& item) {
        for (int w = 0; w < 2; ++w) {
          ptx::mbarrier_wait(shared.tile_empty[w], parity);
          copy_tile(shared.sTile[w], w == 0 ? params.k : params.v, item.key_begin, item.kv_head,
                    shared.tile_full[w]);
        }
        parity ^= 1;
      },
      [&](const WideKeyItem& item, int head, int query, int stage) {
        uint64_t& full = shared.ring.full[stage];
        const int64_t row = item.query_begin + query;
        copy_pair(shared.sQ[stage], params.q, shared.sGradOut[stage], params.grad_out, row, head,
                  full);
      });
}

// Copies lse and delta; one warp.
template <typename Config>
__device__ __forceinline__ void copy_statistics(const AttentionBackwardParams& attention,
                                                WideDkdvStorage<Config>& shared) {
  const int lane = threadIdx.x % 32;
  ptx::griddepcontrol_wait();
  for_wide_steps<Config>(
      attention, shared, lane == 0, [](const WideKeyItem& /*item*/) {},
      [&](const WideKeyItem& item, int head, int query, int stage) {
#pragma unroll
        for (int row = lane; row < Config::kRows; row += 32) {
          float lse_log2 = INFINITY, delta = 0.0f;
          if (query + row < item.num_queries) {
            const int64_t statistic = (item.query_begin + query + row) * attention.heads + head;
            const float lse = static_cast<const float*>(attention.lse)[statistic];
            if (lse != -INFINITY) lse_log2 = lse * kLog2E;
            delta = __ldcg(static_cast<const float*>(attention.delta) + statistic);
          }
          shared.sStatistics[stage][0][row] = lse_log2;
          shared.sStatistics[stage][1][row] = delta;
        }
        shared.ring.publish(stage);
      });
}

// A warpgroup that computes dv (kOfValues) or dk of each item.
template <typename Config, bool kOfValues>
struct WideDkdvConsumer {
  using Element = typename Config::Element;
  using Storage = WideDkdvStorage<Config>;
  static constexpr int kRows = Config::kRows, kScoreBlocks = kRows / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kWarpgroup = kOfValues ? 0 : 1;
  static constexpr int kZeroedBarrier = 1;

  const AttentionBackwardParams& attention;
  Storage& shared;
  const int lane, own_row;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kStages> slot;
  RingPosition<Storage::kProbsStages> probs;
  int tile_parity = 0;

  __device__ __forceinline__ WideDkdvConsumer(const AttentionBackwardParams& params,
                                              Storage& storage)
      : attention(params),
        shared(storage),
        lane(threadIdx.x % 32),
        own_row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(uint64_t& barrier) {
    __syncwarp();  // all lanes have read what the others may now overwrite
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // A step's operands. Every lane that has read a delta arrives for itself, as racecheck follows
  // it; what is read of lse is behind the barriers of P^T.
  __device__ __forceinline__ void release(int stage) {
    if constexpr (kOfValues) {
      arrive(shared.ring.empty[stage]);
    } else {
      shared.ring.release(stage);
    }
  }
  // S^T = K Q^T, or dP^T = V dO^T
  __device__ __forceinline__ void start_scores(Accumulator<1, kScoreBlocks>& s, int stage) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sTile[kWarpgroup], 0,
                       kOfValues ? shared.sQ[stage] : shared.sGradOut[stage]);
    ptx::wgmma_commit_group();
  }
  // P^T = exp2(...)
  __device__ __forceinline__ void finish_scores(Accumulator<1, kScoreBlocks>& s,
                                                const WideKeyItem& item,
                                                const WideSteps<kRows>& range, int query,
                                                int stage) const {
    const float scale_log2 = static_cast<float>(attention.scale) * kLog2E;
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      const float2 lse = columns_of_lane(shared.sStatistics[stage][0], block, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] =
            ptx::ex2_approx(__fmaf_rn(s[0][block][i], scale_log2, i % 2 == 0 ? -lse.x : -lse.y));
    }
    if (range.window.cuts_tile(item.key, kRows, query, kRows, item.num_queries))
      replace_unseen(s, 0.0f, range.window, item.key + own_row, query, item.num_queries, lane);
  }
  __device__ __forceinline__ void write_probs(const Accumulator<1, kScoreBlocks>& s) {
    shared.probs.acquire(probs);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      shared.sProbs[probs.stage][block][threadIdx.x % 128] =
          make_float4(s[0][block][0], s[0][block][1], s[0][block][2], s[0][block][3]);
    }
    shared.probs.publish(probs.advance());
  }
  // dS^T = P^T * (dP^T - delta)
  __device__ __forceinline__ void finish_grad_probs(Accumulator<1, kScoreBlocks>& dp, int stage) {
    shared.probs.wait(probs);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      const float4 p = shared.sProbs[probs.stage][block][threadIdx.x % 128];
      const float2 delta = columns_of_lane(shared.sStatistics[stage][1], block, lane);
      dp[0][block][0] = p.x * (dp[0][block][0] - delta.x);
      dp[0][block][1] = p.y * (dp[0][block][1] - delta.y);
      dp[0][block][2] = p.z * (dp[0][block][2] - delta.x);
      dp[0][block][3] = p.w * (dp[0][block][3] - delta.y);
    }
    shared.probs.release(probs.advance());
  }
  // dV += P^T dO, or dK += dS^T Q
  __device__ __forceinline__ void start_grad(Accumulator<1, kOutBlocks>& grad,
                                             const Accumulator<1, kScoreBlocks>& s, int stage) {
    const PackedRows<Element, kScoreBlocks> packed(s);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(grad, packed, kOfValues ? shared.sGradOut[stage] : shared.sQ[stage]);
    ptx::wgmma_commit_group();
  }
  // Rows that both warpgroups zero, since both read them.
  __device__ __forceinline__ int wait_for_step(int rows) {
    shared.ring.wait(slot);
    const int stage = slot.advance();
    if (rows < kRows) {
      zero_rows(shared.sQ[stage], rows);
      zero_rows(shared.sGradOut[stage], rows);
      ptx::bar_sync(kZeroedBarrier + kWarpgroup, 128);
    }
    return stage;
  }

  __device__ __forceinline__ void run_steps(const WideKeyItem& item, const WideSteps<kRows>& range,
                                            Accumulator<1, kOutBlocks>& grad) {
    const int group = attention.heads / attention.kv_heads;
    int last = -1;  // the stage whose product is in flight
    ptx::mbarrier_wait(shared.tile_full[kWarpgroup], tile_parity);
    tile_parity ^= 1;
    for (int member = 0; member < group; ++member) {
      for (int query = range.first; query < range.last; query += kRows) {
        const int stage = wait_for_step(item.num_queries - query);
        Accumulator<1, kScoreBlocks> s;
        start_scores(s, stage);
        ptx::wgmma_wait_group<1>();
        ptx::fence_operands(grad[0]);
        if (last >= 0) release(last);
        last = stage;
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(s[0]);
        if (member + 1 == group && query + kRows >= range.last)
          arrive(shared.tile_empty[kWarpgroup]);
        if constexpr (kOfValues) {
          finish_scores(s, item, range, query, stage);
          write_probs(s);
        } else {
          finish_grad_probs(s, stage);
        }
        start_grad(grad, s, stage);
      }
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(grad[0]);
    release(last);
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const WideKeyItem item = shared.item[stage];
      __syncwarp();
      arrive(shared.items.empty[stage]);
      if (item.is_end) return;
      const WideSteps<kRows> range(attention, item);
      Accumulator<1, kOutBlocks> grad = {};
      if (range.first < range.last) run_steps(item, range, grad);
      const float scale = kOfValues ? 1.0f : static_cast<float>(attention.scale),
                  scales[2] = {scale, scale};
      const HeadsView& view = kOfValues ? attention.grad_v : attention.grad_k;
      store_quads(grad, scales, row_of<Element>(view, item.key_begin + own_row, item.kv_head),
                  view.row_stride, item.keys - own_row,
                  kOfValues ? attention.dim_v : attention.dim_qk, lane);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void wide_dkdv(const __grid_constant__ BackwardOperands params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<WideDkdvStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    shared.items.init(kConsumerWarps + 2);
    shared.ring.init(kConsumerWarps / 2 + 128, 1 + 32);
    shared.probs.init(128, 128);
    for (uint64_t& barrier : shared.tile_full) ptx::mbarrier_init(barrier, 1);
    for (uint64_t& barrier : shared.tile_empty) ptx::mbarrier_init(barrier, 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) schedule_wide_keys<Config>(params.attention, shared);
    if (threadIdx.x == 32) copy_for_dkdv<Config>(params, shared);
    if (warp == 2) copy_statistics<Config>(params.attention, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    if (warpgroup == 1) {
      WideDkdvConsumer<Config, true>(params.attention, shared).run();
    } else {
      WideDkdvConsumer<Config, false>(params.attention, shared).run();
    }
  }
}

}  // namespace jagged_cuda::attention
