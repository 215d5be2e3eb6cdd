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

#include "cuda/kernels/attention/long_forward.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct WideBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_, kRows = 64;  // of a tile of shared memory
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileM = kWarpgroups * kRows;  // queries of an item of wide_dq
  // As many as there is room for.
  static constexpr int kKeyStages = kDim == 256 ? 2 : 3, kValueStages = kDim == 256 ? 1 : 2,
                       kStages = kDim == 256 ? 2 : 3;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr PathName kName = PathName("cuda.attention.backward.wide.d") + kDim;
  static_assert(kDim == 192 || kDim == 256);
};

struct WideBackwardParams {
  CUtensorMap q;  // boxes of 64 rows of one head
  CUtensorMap grad_out;
  CUtensorMap k;
  CUtensorMap v;
  AttentionBackwardParams attention;  // long_plan: of the kernel's own items
};

// Rows of a tile from `rows` on become zeros; all threads of a warpgroup, which must then meet.
template <typename Tile>
__device__ __forceinline__ void zero_tile_rows(Tile& tile, int rows) {
#pragma unroll 1
  for (int index = threadIdx.x % 128; index < (Tile::kRows - rows) * Tile::kChunks; index += 128) {
    *reinterpret_cast<uint4*>(tile.chunk(rows + index / Tile::kChunks, index % Tile::kChunks)) =
        make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async();
}

// --- dq

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

// Copies what the items need, in the order of its use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_for_dq(const WideBackwardParams& params,
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
      ptx::mbarrier_arrive_expect_tx(shared.q_full[w], 2 * sizeof(shared.sQ[w].data));
      copy_expected_tile(shared.sQ[w], params.q, row, item.head, shared.q_full[w]);
      copy_expected_tile(shared.sGradOut[w], params.grad_out, row, item.head, shared.q_full[w]);
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
      zero_tile_rows(shared.sK[stage], rows);
      ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
    }
    return stage;
  }
  __device__ __forceinline__ void start_scores(Accumulator<1, kScoreBlocks>& s, int stage) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sQ[warpgroup], 0, shared.sK[stage]);
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
      ptx::wgmma_fence();
      wgmma_rows_by_rows(dp, shared.sGradOut[warpgroup], 0, shared.sV[value_stage]);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::fence_operands(s[0]);
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[0][block][i] = ptx::ex2_approx(__fmaf_rn(s[0][block][i], scale_log2, -lse_log2[i / 2]));
      }
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
      arrive(shared.values.empty[value_stage]);
      if (key + kRows >= last_key) arrive(shared.q_empty[warpgroup]);
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][block][i] *= dp[0][block][i] - delta[i / 2];
      }
      if (window.cuts_tile(tile.row + warpgroup * kRows, kRows, key, kRows, tile.num_keys))
        replace_unseen(s, 0.0f, window, tile.row + own_row, key, tile.num_keys, lane);
      const PackedRows<Element, kScoreBlocks> ds(s);
      ptx::wgmma_fence();
      wgmma_packed_by_columns(dq, ds, shared.sK[stage]);
      ptx::wgmma_commit_group();
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
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool valid = own_row + 8 * half < tile.rows;
        const int64_t row = global_row + 8 * half, statistic = row * attention.heads + head;
        lse_log2[half] =
            valid ? static_cast<const float*>(attention.lse)[statistic] * kLog2E : 0.0f;
        delta[half] = row_delta<Element>(attention, row, head, valid, lane);
        if (valid && lane % 4 == 0) static_cast<float*>(attention.delta)[statistic] = delta[half];
      }
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
                             1) void wide_dq(const __grid_constant__ WideBackwardParams params) {
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

// --- dk and dv

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
static_assert(sizeof(WideDqStorage<WideBackwardConfig<__half, 192>>) <= 227 * 1024);
static_assert(sizeof(WideDqStorage<WideBackwardConfig<__half, 256>>) <= 227 * 1024);
static_assert(sizeof(WideDkdvStorage<WideBackwardConfig<__half, 192>>) <= 227 * 1024);
static_assert(sizeof(WideDkdvStorage<WideBackwardConfig<__half, 256>>) <= 227 * 1024);

// The queries that see a tile of keys, from a multiple of the step on.
template <int kStep>
struct WideSteps {
  WindowOf<int> window;  // of the keys over the queries
  int first, last;

  __device__ __forceinline__ WideSteps(const AttentionParams& params, const WideKeyItem& item)
      : window(WindowOf<int>{item.num_keys - item.num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)}
                   .transposed()),
        first(window.first_column(item.key) / kStep * kStep),
        last(window.last_column(item.key, item.keys, item.num_queries)) {}
};

// Takes items from the plan, one ahead; one warp.
template <typename Config>
__device__ __forceinline__ void schedule_wide_keys(const AttentionParams& attention,
                                                   WideDkdvStorage<Config>& shared) {
  RingPosition<WideDkdvStorage<Config>::kItems> place;
  const auto publish = [&](const WideKeyItem& item) {
    shared.items.acquire(place);
    if (threadIdx.x % 32 == 0) {
      shared.item[place.stage] = item;
      ptx::mbarrier_arrive(shared.items.full[place.stage]);
    }
    __syncwarp();
    place.advance();
  };
  // Where late keys are seen by more queries, they come first.
  const bool descending = attention.window_left < AttentionParams::kUnbounded &&
                          attention.window_right >= AttentionParams::kUnbounded;
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
__device__ __forceinline__ void copy_for_dkdv(const WideBackwardParams& params,
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
        ptx::mbarrier_arrive_expect_tx(full, 2 * sizeof(shared.sQ[0].data));
        copy_expected_tile(shared.sQ[stage], params.q, row, head, full);
        copy_expected_tile(shared.sGradOut[stage], params.grad_out, row, head, full);
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
  // A step's operands. Every lane that has read a delta arrives for itself, as racecheck follows it;
  // what is read of lse is behind the barriers of P^T.
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
      const float2 lse = *reinterpret_cast<const float2*>(
          &shared.sStatistics[stage][0][block * 8 + 2 * (lane % 4)]);
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
      const float2 delta = *reinterpret_cast<const float2*>(
          &shared.sStatistics[stage][1][block * 8 + 2 * (lane % 4)]);
      dp[0][block][0] = p.x * (dp[0][block][0] - delta.x);
      dp[0][block][1] = p.y * (dp[0][block][1] - delta.y);
      dp[0][block][2] = p.z * (dp[0][block][2] - delta.x);
      dp[0][block][3] = p.w * (dp[0][block][3] - delta.y);
    }
    shared.probs.release(probs.advance());
  }
  // Rows that both warpgroups zero, since both read them.
  __device__ __forceinline__ int wait_for_step(int rows) {
    shared.ring.wait(slot);
    const int stage = slot.advance();
    if (rows < kRows) {
      zero_tile_rows(shared.sQ[stage], rows);
      zero_tile_rows(shared.sGradOut[stage], rows);
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
        const PackedRows<Element, kScoreBlocks> packed(s);
        ptx::wgmma_fence();
        wgmma_packed_by_columns(grad, packed,
                                kOfValues ? shared.sGradOut[stage] : shared.sQ[stage]);
        ptx::wgmma_commit_group();
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
                             1) void wide_dkdv(const __grid_constant__ WideBackwardParams params) {
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

template <typename Config>
cudaError_t launch_wide_backward(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Tile = typename WideDqStorage<Config>::Tile;
  WideBackwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total,
                num_seqs = attention.q_offsets.num_seqs;
  int device = 0, num_sms = 0;
  const cudaError_t errors[] = {
      encode_heads<Tile>(params.q, attention, attention.q, queries, attention.heads,
                         attention.dim_qk),
      encode_heads<Tile>(params.grad_out, attention, attention.grad_out, queries, attention.heads,
                         attention.dim_v),
      encode_heads<Tile>(params.k, attention, attention.k, keys, attention.kv_heads,
                         attention.dim_qk),
      encode_heads<Tile>(params.v, attention, attention.v, keys, attention.kv_heads,
                         attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  const auto grid = [&](int64_t items) { return Grid{items < num_sms ? items : num_sms}; };
  const Grid dq_grid = grid(num_tiles(queries, num_seqs, Config::kTileM) * attention.heads),
             dkdv_grid = grid(num_tiles(keys, num_seqs, Config::kRows) * attention.kv_heads);
  constexpr auto kDq = wide_dq<Config>;
  constexpr int kDqBytes = sizeof(WideDqStorage<Config>);
  cudaError_t error;
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
