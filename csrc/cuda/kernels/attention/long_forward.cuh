// Forward of jagged_flash_attention for long sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements. For a tile of queries of one sequence and head, over tiles j of its keys, with
// c = |scale| log2(e) and a reference m that seldom moves (LazySoftmax):
//     S_j = Q K_j^T,  P_j = exp2(c (S_j - m)),  l = l r + rowsum P_j,  O = O r + P_j V_j
// where r = exp2(c (m before - m)), and at the end out = O / l, lse = scale m + ln l.
//
// Grid: one CTA per SM, which takes items (tile of kTileM queries, head) from a plan that lists long
// sequences first (long_plan.cuh), until there are no more. A CTA has a warpgroup of producers and
// kWarpgroups that compute 64 rows each:
//
//     scheduler (one warp)     copier (one thread)          each computing warpgroup
//     for each item:           for each item:               for each item:
//       take it, publish it      Q, K_0                       for each key tile j:
//                                for each key tile j:           take the turn
//                                  K_{j+1}, V_j                 start S = Q K_j^T
//                                                               start O += P_{j-1} V_{j-1}
//                                                               pass the turn
//                                                               P_j = softmax step of S
//
// The product with the last P of an item is started together with the first S of the next item,
// behind which the output of the item is stored: the tensor cores do not wait between items. Above
// 128 dims there is no room for a second Q (kOwnQueries): each warpgroup has a tile of Q for itself,
// which is filled anew as soon as it has computed its last S of an item, and the last product and
// the output of an item come before the next Q. There a warpgroup also passes over the key tiles at
// the end of an item that its rows do not see. Only
// one warpgroup at a time hands products to the tensor cores, while the others are at their
// exponentials: a warp that starts a product waits until those before it are done.
//
// Registers: setmaxnreg moves them from the producers to the others. A product that accumulates
// reads and writes its accumulators in the register file, which slows all other instructions of the
// SM down by about 1.6: so what counts is how few there are between two turns.
//
// Shared memory, in rows of 2 kDim bytes: Q kTileM rows, twice (above 128 dims once); kSlots tiles of
// kTileN rows, through which K and V pass in the order above. 112, 192, 216, 224 KiB for kDim 64,
// 128, 192, 256.
//
// Barriers:           arrives                              waits
//     items.full      scheduler                            copier, computing warps
//     items.empty     copier, computing warps              scheduler; then sQ is free as well
//     q_full          copier, with the bytes of Q          computing warps
//     q_empty[w]      warpgroup w, after its last S        copier (kOwnQueries)
//     ring.full       copier, with the bytes of a tile     computing warps
//     ring.empty      computing warps, after its product   copier
//     turn[w]         warpgroup w - 1, modulo their number warpgroup w, before it starts products
//     zeroed[w]       warpgroup w                          the same, after it has written zeros
// All warpgroups take equally many turns, those without rows in a tile too: one per key tile, one
// per item without keys and one at the end.
//
// A copy may reach into the next sequence. Of K that gives scores that are masked; rows of V past
// the end are overwritten with zeros, since 0 times NaN is NaN; rows of Q give rows that are not
// stored. A sequence of length 0 is not planned; one without keys gives out 0, lse -inf, and so do
// rows outside all sequences, where the plan has them.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_plan.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct LongForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  // Three need 160 registers each, which hold S, P and O of 64 dims.
  static constexpr int kWarpgroups = kDim == 64 ? 3 : 2;
  static constexpr int kTileM = kWarpgroups * 64;
  // Nothing depends on the batch, so that a row's bits depend on its own sequence alone.
  static constexpr int kTileN = kDim == 256 ? 80 : kDim == 192 ? 112 : 128;
  static constexpr int kSlots = 4;
  // Where there is no room for two items: each warpgroup has a tile of Q for itself.
  static constexpr bool kOwnQueries = kDim > 128;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  // Together with the producers' all that kThreads have at the start.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr PathName kName = PathName("cuda.attention.forward.long.d") + kDim;
  static_assert(kDim == 64 || kDim == 128 || kDim == 192 || kDim == 256);
};

struct LongForwardParams {
  CUtensorMap q;  // boxes of QueryRows::kRows rows of one head
  CUtensorMap k;  // boxes of kTileN rows
  CUtensorMap v;
  AttentionParams attention;
};

struct WorkItem {
  QueryTile tile;
  int head;
  bool is_end;  // there are no more
};

template <typename Config>
struct LongForwardStorage {
  using Element = typename Config::Element;
  static constexpr int kItems = 2;
  // One per stage of item, or per warpgroup.
  static constexpr int kQueryTiles = 2;
  using QueryRows = WarpgroupTile<Element, Config::kOwnQueries ? 64 : Config::kTileM, Config::kDim>;
  using KeyRows = WarpgroupTile<Element, Config::kTileN, Config::kDim>;
  QueryRows sQ[kQueryTiles];
  KeyRows slots[Config::kSlots];
  Ring<kItems> items;  // of item, and of sQ if not kOwnQueries
  uint64_t q_full[kQueryTiles], q_empty[kQueryTiles];
  Ring<Config::kSlots> ring;  // of slots
  WorkItem item[kItems];
};

// Takes items from the plan, one ahead; one warp.
template <typename Config, typename Storage>
__device__ __forceinline__ void schedule(const AttentionParams& attention, Storage& shared) {
  RingPosition<Storage::kItems> place;
  const auto publish = [&](const WorkItem& item) {
    shared.items.acquire(place);
    if (threadIdx.x % 32 == 0) {
      shared.item[place.stage] = item;
      ptx::mbarrier_arrive(shared.items.full[place.stage]);
    }
    __syncwarp();
    place.advance();
  };
  // Where late queries see more keys, they come first, those of all heads.
  const bool descending = attention.window_right < AttentionParams::kUnbounded;
  auto items = PlannedItems::of<Config::kTileM, false>(attention, attention.heads);
  PlannedSequence sequence;
  int64_t index;
  while (items.next(sequence, index)) {
    const int tiles = (sequence.num_queries + Config::kTileM - 1) / Config::kTileM;
    // Wrong offsets make a plan whose numbers overflow.
    if (index < 0 || index >= static_cast<int64_t>(tiles) * attention.heads) continue;
    const RowRange kv = planned_keys(attention, sequence);
    WorkItem item = {};
    const int fastest = descending ? attention.heads : tiles;
    const int slow = static_cast<int>(index / fastest), fast = static_cast<int>(index % fastest);
    item.tile.row = (descending ? tiles - 1 - slow : fast) * Config::kTileM;
    item.tile.rows = min(Config::kTileM, sequence.num_queries - item.tile.row);
    item.tile.num_queries = sequence.num_queries;
    item.tile.num_keys = static_cast<int>(kv.len);
    item.tile.global_row = sequence.begin + item.tile.row;
    item.tile.key_begin = kv.begin;
    item.head = descending ? fast : slow;
    publish(item);
  }
  WorkItem end = {};
  end.is_end = true;
  publish(end);
  ptx::griddepcontrol_wait();  // launch_dependent
}

// Copies Q, K and V of the items, in the order of their use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_operands(const LongForwardParams& params,
                                              LongForwardStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<LongForwardStorage<Config>::kItems> place;
  RingPosition<Config::kSlots> slot;
  unsigned q_parities = ~0u;  // one bit per warpgroup
  for (;;) {
    shared.items.wait(place);
    const WorkItem item = shared.item[place.stage];
    const int stage = place.advance();
    shared.items.release(stage);
    if (item.is_end) return;
    const KeyRange keys(item.tile, window_of(attention, item.tile), Config::kTileN);
    if (keys.first >= keys.last) continue;
    const auto copy = [&](const CUtensorMap& map, int key) {
      shared.ring.acquire(slot);
      copy_tile(shared.slots[slot.stage], map, item.tile.key_begin + key, item.head / group,
                shared.ring.full[slot.stage]);
      slot.advance();
    };
    if constexpr (!Config::kOwnQueries)
      copy_tile(shared.sQ[stage], params.q, item.tile.global_row, item.head, shared.q_full[stage]);
    copy(params.k, keys.first);
    if constexpr (Config::kOwnQueries) {
      for (int w = 0; w < Config::kWarpgroups && w * 64 < item.tile.rows; ++w) {
        ptx::mbarrier_wait(shared.q_empty[w], q_parities >> w & 1);
        q_parities ^= 1u << w;
        copy_tile(shared.sQ[w], params.q, item.tile.global_row + w * 64, item.head,
                  shared.q_full[w]);
      }
    }
    for (int key = keys.first; key < keys.last; key += Config::kTileN) {
      if (key + Config::kTileN < keys.last) copy(params.k, key + Config::kTileN);
      copy(params.v, key);
    }
  }
}

// A warpgroup that computes 64 rows of each item.
template <typename Config>
struct LongForwardConsumer {
  using Element = typename Config::Element;
  using Storage = LongForwardStorage<Config>;
  static constexpr int kTileN = Config::kTileN, kScoreBlocks = kTileN / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kTurnBarrier = 1, kZeroedBarrier = kTurnBarrier + Config::kWarpgroups;
  static constexpr int kTurnThreads = 256;  // of two warpgroups

  const AttentionParams& attention;
  Storage& shared;
  const int warpgroup, lane, own_row;
  const float scale, scale_log2;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kSlots> slot;
  unsigned q_parities = 0;  // one bit per tile of Q
  LazySoftmax softmax;
  Accumulator<1, kScoreBlocks> s;
  Accumulator<1, kOutBlocks> o;
  PackedRows<Element, kScoreBlocks> p;
  float rescale[1][2];

  // The scale is at least a tiny positive number: with scale 0 all scores are equal, but a masked
  // one, -inf, must stay so.
  __device__ __forceinline__ LongForwardConsumer(const AttentionParams& params, Storage& storage,
                                                 int own_warpgroup)
      : attention(params),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(threadIdx.x % 32),
        own_row(own_warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4),
        scale(static_cast<float>(params.scale)),
        scale_log2(fmaxf(fabsf(scale) * kLog2E, 1e-30f)) {}

  __device__ __forceinline__ void take_turn() const {
    ptx::bar_sync(kTurnBarrier + warpgroup, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1;
    ptx::bar_arrive(kTurnBarrier + next, kTurnThreads);
  }
  __device__ __forceinline__ int wait_for_slot() {
    shared.ring.wait(slot);
    return slot.advance();
  }
  __device__ __forceinline__ void release_slot(int stage) {
    if (lane == 0) shared.ring.release(stage);
  }
  __device__ __forceinline__ void release_item(int stage) {
    if (lane == 0) shared.items.release(stage);
  }
  __device__ __forceinline__ int query_tile(int item_stage) const {
    return Config::kOwnQueries ? warpgroup : item_stage;
  }
  __device__ __forceinline__ void wait_for_queries(int item_stage) {
    const int tile = query_tile(item_stage);
    ptx::mbarrier_wait(shared.q_full[tile], q_parities >> tile & 1);
    q_parities ^= 1u << tile;
  }
  // Behind the last S of an item.
  __device__ __forceinline__ void release_queries() {
    if (Config::kOwnQueries && lane == 0) ptx::mbarrier_arrive(shared.q_empty[warpgroup]);
  }

  // S = Q K^T
  __device__ __forceinline__ void start_scores(int item_stage, int stage) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sQ[query_tile(item_stage)],
                       Config::kOwnQueries ? 0 : warpgroup * 64, shared.slots[stage]);
    ptx::wgmma_commit_group();
  }
  // Signs and masks of S, the scores of keys from `key` on, when their product is done.
  __device__ __forceinline__ void finish_scores(const QueryTile& tile, const WindowOf<int>& window,
                                                int key) {
    ptx::fence_operands(s[0]);
    if (scale < 0.0f) {
      // The maximum of scale * S lies where -S is largest.
#pragma unroll
      for (int e = 0; e < kScoreBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
    }
    const int first_row = tile.row + warpgroup * 64, row = tile.row + own_row;
    if (window.cuts_tile(first_row, 64, key, kTileN, tile.num_keys)) {
      if (window.first_column(first_row + 63) > key) {
        replace_unseen(s, -INFINITY, window, row, key, tile.num_keys, lane);
      } else {
        replace_behind(s, -INFINITY, window, row, key, tile.num_keys, lane);
      }
    }
  }
  // O += P V
  __device__ __forceinline__ void start_output(int stage) {
    ptx::fence_operands(o[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(o, p, shared.slots[stage]);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void finish_output(int stage) {
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(o[0]);
    release_slot(stage);
  }
  // Rows of V from `rows` on become zeros. All warpgroups write the same.
  __device__ __forceinline__ void zero_values(int stage, int rows) {
    constexpr int kChunks = Storage::KeyRows::kChunks;
    if (rows >= kTileN) return;
    for (int index = threadIdx.x % 128; index < (kTileN - rows) * kChunks; index += 128) {
      *reinterpret_cast<uint4*>(shared.slots[stage].chunk(
          rows + index / kChunks, index % kChunks)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
  }

  __device__ __forceinline__ void reset() {
    softmax = LazySoftmax();
#pragma unroll
    for (int e = 0; e < kOutBlocks * 4; ++e) o[0][e / 4][e % 4] = 0.0f;
  }
  __device__ __forceinline__ void store_item(const WorkItem& item) {
    softmax.finish();
    const int rows = item.tile.rows - own_row;  // from this lane's first on
    const int64_t global_row = item.tile.global_row + own_row;
    float inverse_sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[half];
      inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && half * 8 < rows) {
        static_cast<float*>(attention.lse)[(global_row + half * 8) * attention.heads + item.head] =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
    store_quads(o, inverse_sum, row_of<Element>(attention.out, global_row, item.head),
                attention.out.row_stride, rows, attention.dim_v, lane);
  }

  // Instead of a product with keys that this warpgroup does not see.
  __device__ __forceinline__ void skip_scores() {
    release_slot(wait_for_slot());
    take_turn();
    pass_turn();
  }

  // The other warpgroups' work on an item, after its first turn.
  __device__ __forceinline__ void skip_item(int item_stage, const KeyRange& keys) {
    if constexpr (!Config::kOwnQueries) wait_for_queries(item_stage);
    for (int key = keys.first; key < keys.last; key += kTileN) {
      if (key != keys.first) {
        take_turn();
        pass_turn();
      }
      for (int i = 0; i < 2; ++i) release_slot(wait_for_slot());
    }
  }

  __device__ __forceinline__ void run() {
    bool pending = false;  // the last product of an item before is missing
    int pending_stage = 0, pending_rows = 0;
    if (warpgroup == Config::kWarpgroups - 1) pass_turn();
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const WorkItem& item = shared.item[stage];
      const QueryTile tile = item.tile;
      const WindowOf<int> window = window_of(attention, tile);
      const KeyRange keys(tile, window, kTileN);
      const bool is_end = item.is_end, has_keys = !is_end && keys.first < keys.last;
      int value_slot = 0;
      if (pending) {
        value_slot = wait_for_slot();
        zero_values(value_slot, pending_rows);
      }
      if (!has_keys || warpgroup * 64 >= tile.rows) {
        if (pending) {
          take_turn();
          start_output(value_slot);
          pass_turn();
          finish_output(value_slot);
          store_item(shared.item[pending_stage]);
          release_item(pending_stage);
          pending = false;
        } else {
          take_turn();
          pass_turn();
        }
        if (is_end) return;
        if (has_keys) {
          skip_item(stage, keys);
        } else {
          reset();
          store_item(item);
        }
        release_item(stage);
        continue;
      }

      wait_for_queries(stage);
      int score_slot = wait_for_slot();
      if (pending) {
        take_turn();
        start_scores(stage, score_slot);
        start_output(value_slot);
        pass_turn();
        finish_output(value_slot);
        ptx::fence_operands(s[0]);
        store_item(shared.item[pending_stage]);
        release_item(pending_stage);
      } else {
        take_turn();
        start_scores(stage, score_slot);
        pass_turn();
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(s[0]);
      }
      release_slot(score_slot);
      // Behind the last key that this warpgroup sees.
      const int last =
          Config::kOwnQueries ? own_last_key(tile, window, keys, warpgroup * 64) : keys.last;
      if (keys.first + kTileN >= last) release_queries();
      reset();
      finish_scores(tile, window, keys.first);
      softmax.update(s, p, rescale, scale_log2, [] {});
      bool is_ready = shared.ring.test(slot);
      int key = keys.first + kTileN;
      for (; key < last; key += kTileN) {
        if (!is_ready) shared.ring.wait(slot);
        score_slot = slot.advance();
        take_turn();
        start_scores(stage, score_slot);
        value_slot = wait_for_slot();
        start_output(value_slot);
        pass_turn();
        ptx::wgmma_wait_group<1>();
        release_slot(score_slot);
        if (key + kTileN >= last) release_queries();
        finish_scores(tile, window, key);
        const bool moved = softmax.update(s, p, rescale, scale_log2, [&] {
          finish_output(value_slot);
          is_ready = shared.ring.test(slot);
        });
        if (moved) rescale_rows(o, rescale);
      }
      pending_rows = tile.num_keys - (key - kTileN);
      if constexpr (Config::kOwnQueries) {
        // The next Q is not there yet, so the last product does not wait for it.
        if (key < keys.last) skip_scores();
        value_slot = wait_for_slot();
        zero_values(value_slot, pending_rows);
        start_output(value_slot);
        finish_output(value_slot);
        for (; key < keys.last; key += kTileN) {
          if (key + kTileN < keys.last) skip_scores();
          release_slot(wait_for_slot());
        }
        store_item(item);
        release_item(stage);
      } else {
        pending = true;
        pending_stage = stage;
      }
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void long_forward(
    const __grid_constant__ LongForwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<LongForwardStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    shared.items.init(kConsumerWarps + 1);
    shared.ring.init(kConsumerWarps);
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
    if (threadIdx.x == 32) copy_operands<Config>(params, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    LongForwardConsumer<Config>(params.attention, shared, warpgroup - 1).run();
  }
}

template <typename Config>
cudaError_t launch_long_forward(const AttentionParams& attention, cudaStream_t stream) {
  using Storage = LongForwardStorage<Config>;
  LongForwardParams params;
  params.attention = attention;
  const cudaError_t errors[] = {encode_heads<typename Storage::QueryRows>(
                                    params.q, attention, attention.q, attention.q_offsets.total,
                                    attention.heads, attention.dim_qk),
                                encode_heads<typename Storage::KeyRows>(
                                    params.k, attention, attention.k, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_qk),
                                encode_heads<typename Storage::KeyRows>(
                                    params.v, attention, attention.v, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t items =
      num_tiles(attention.q_offsets.total, attention.q_offsets.num_seqs, Config::kTileM) *
      attention.heads;
  const Grid grid{items < num_sms ? items : num_sms};
  if (takes_own_plan(attention, attention.q_offsets, Config::kTileM, attention.heads, num_sms)) {
    params.attention.plans_itself = true;
    return launch_planning<long_forward<Config>>(attention, params, grid, Config::kThreads,
                                                 sizeof(Storage), stream, Config::kName);
  }
  error = launch_plan<Config::kTileM, AttentionParams>(attention, stream);
  if (error != cudaSuccess) return error;
  return launch_dependent<long_forward<Config>>(params, grid, Config::kThreads, sizeof(Storage),
                                                stream, Config::kName);
}

template <typename Element>
cudaError_t launch_forward_long(const AttentionParams& params, cudaStream_t stream) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  if (dim <= 64) return launch_long_forward<LongForwardConfig<Element, 64>>(params, stream);
  if (dim <= 128) return launch_long_forward<LongForwardConfig<Element, 128>>(params, stream);
  if (dim <= 192) return launch_long_forward<LongForwardConfig<Element, 192>>(params, stream);
  return launch_long_forward<LongForwardConfig<Element, 256>>(params, stream);
}

}  // namespace jagged_cuda::attention
