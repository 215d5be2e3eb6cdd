// Backward of jagged_target_attention with many queries, on wgmma and TMA (compute capability 9.0),
// 16-bit elements, head dims up to 128. The mathematics are those of target_backward.cuh: all three
// gradients at once, K and V read once, dK and dV written once, dQ in parts by chunks of keys.
//
// Grid: one CTA per SM, which takes one item after another (target_items.cuh): a chunk of
// 2^kTargetWgmmaChunkLog2 keys (find_chunk) and a key/value head, all of whose rows, the N queries of a
// group's heads, stay in shared memory.
// Tiles of 64 keys go to two warpgroups in turn, so that one's exponentials run beside the other's
// products; a third sums dQ, in the order of the keys:
//
//     producer (one warp)       each of two warpgroups               the third
//     for each item:            for each item:                       for each item:
//       find it, publish it       both: Q, dO, lse, delta
//       for each tile:            for every second tile:               for each tile:
//         K, V                      S^T = K Q^T, dP^T = V dO^T
//                                   P^T, dS^T, to registers
//                                   dV = P^T dO
//                                   dS^T to shared memory                dQ += dS K
//                                   dK = dS^T Q, dV leaves             write dQ, or its part
//                                   dK leaves
//
// Each key is in one tile, so its gradients are complete when its products are. No atomics: the same
// bits at every run.
//
// Shared memory: Q and dO kRows rows, a ring of kStages tiles of K and of V, of 2 kDim bytes per row,
// dS^T of both warpgroups, 64 rows of 2 kRows bytes each, lse and delta: 193, 225 KiB for kDim 64,
// 128 with 128 rows. dV and dK leave through the place of V, whose product is done by then.
//
// Barriers:          arrives                                    waits
//     items.full     producer                                   computing warps
//     items.empty    computing threads, when they have read it  producer
//     keys.full      producer, with the bytes of K              warpgroup of the tile
//     keys.empty     the third, after its product               producer
//     values.full    producer, with the bytes of V              warpgroup of the tile
//     values.empty   warpgroup of the tile, when dK has left    producer
//     scores.full    warpgroup of the tile: dS^T is written,    the third
//                    and zeros in K
//     scores.empty   the third, after its product               warpgroup of the tile
//     kQueries       both, when they are done with an item's    the same
//                    rows, and when the next one's are there
//     kOwn + w       warpgroup w: all warps have read K and V   the same
//
// A last tile's copies may reach into the next sequence: what such keys add to dV and dK is not
// stored; their dS is 0, and their rows of K are overwritten with zeros, since 0 times NaN is NaN.
// Rows of Q and dO past the end are zeros, and so are their lse and delta: they add nothing. An empty
// sequence has one chunk without keys: dQ 0. Rows of k and v outside all sequences get zeros.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/store_tile.cuh"
#include "cuda/kernels/attention/target_backward.cuh"
#include "cuda/kernels/attention/target_forward_wgmma.cuh"
#include "cuda/kernels/attention/target_items.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, int kRows_>
struct TargetBackwardWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;    // columns of Q, K, V, dO in shared memory
  static constexpr int kRows = kRows_;  // of Q and dO
  static constexpr int kKeys = 64;      // of a tile
  static constexpr int kStages = kDim == 128 ? 4 : 8;
  static constexpr int kItems = 2;    // published ahead
  static constexpr int kScorers = 2;  // warpgroups that compute scores
  static constexpr int kThreads = (kScorers + 2) * 128;
  // Those of dK or dV and of scores, or of dQ, take 128.
  static constexpr int kProducerRegisters = 32, kScorerRegisters = 160, kSumRegisters = 160;
  static constexpr PathName kName = PathName("cuda.target.backward.wgmma.d") + kDim + ".r" + kRows;
  static_assert((kDim == 64 || kDim == 128) && kRows % 64 == 0 && kStages % kScorers == 0);
  static_assert(kProducerRegisters + kScorers * kScorerRegisters + kSumRegisters <= 512);
};

struct TargetBackwardWgmmaParams {
  CUtensorMap k;  // boxes of a tile's rows of one head
  CUtensorMap v;
  CUtensorMap grad_k;  // boxes of kStoredRows rows
  CUtensorMap grad_v;
  TargetAttentionBackwardParams target;
  int64_t items;
};

struct TargetBackwardItem {
  TargetChunk chunk;  // does not exist: there are no more
  int kv_head;
};

template <typename Config>
struct TargetBackwardWgmmaStorage {
  using Element = typename Config::Element;
  using QueryRows = WarpgroupTile<Element, Config::kRows, Config::kDim>;
  using KeyRows = WarpgroupTile<Element, Config::kKeys, Config::kDim>;
  using Scores = WarpgroupTile<Element, Config::kKeys, Config::kRows>;
  QueryRows sQ, sGradOut;
  KeyRows sK[Config::kStages], sV[Config::kStages];
  Scores sDs[Config::kScorers];           // dS^T
  alignas(16) float sLse[Config::kRows];  // times log2(e)
  alignas(16) float sDelta[Config::kRows];
  Ring<Config::kStages> keys, values;
  Ring<Config::kScorers> scores;
  Ring<Config::kItems> items;
  TargetBackwardItem item[Config::kItems];

  // One thread.
  __device__ __forceinline__ void init() {
    keys.init(128);
    values.init(128);
    scores.init(256, 128);
    items.init((Config::kScorers + 1) * 128);
    ptx::fence_mbarrier_init();
  }
  // Item number `number` of the CTA.
  __device__ __forceinline__ TargetBackwardItem take(int number) {
    const int place = number % Config::kItems;
    items.wait({place, number / Config::kItems % 2});
    const TargetBackwardItem taken = item[place];
    items.release(place);
    return taken;
  }
};

// The rows of an item on their way to L2, long before they are copied; one warp.
__device__ __forceinline__ void prefetch_target_rows(const TargetAttentionBackwardParams& params,
                                                     const TargetBackwardItem& item, int lane) {
  constexpr int kLine = 64;  // elements
  const TargetRows target(params, item.chunk.seq, item.kv_head);
  const auto line_of = [&](const void* data, int64_t element) {
    ptx::prefetch_l2(static_cast<const char*>(data) + element * 2);
  };
#pragma unroll 1
  for (int row = lane; row < target.count(); row += 32) {
    for (int column = 0; column < params.dim_qk; column += kLine)
      line_of(params.q.data, target.offset(params.q, row) + column);
    for (int column = 0; column < params.dim_v; column += kLine) {
      line_of(params.grad_out.data, target.offset(params.grad_out, row) + column);
      line_of(params.out, target.index(row) * params.dim_v + column);
    }
  }
}

// All lanes of a warp find the items, the first one publishes them and copies their keys and values.
template <typename Config>
__device__ __forceinline__ void produce_target_keys(const TargetBackwardWgmmaParams& params,
                                                    TargetBackwardWgmmaStorage<Config>& shared,
                                                    int lane) {
  using Element = typename Config::Element;
  const TargetAttentionBackwardParams& target = params.target;
  const uint64_t policy = ptx::l2_policy(/*is_read_once=*/true);
  RingPosition<Config::kStages> stage;
  RingPosition<Config::kItems> place;
  const auto publish = [&](const TargetBackwardItem& item) {  // one lane
    shared.items.acquire(place);
    shared.item[place.stage] = item;
    shared.items.publish(place.advance());
  };
#pragma unroll 1
  for (TargetItems items(target.next_item); items.index < params.items; items.advance()) {
    const int64_t index = items.index;
    const TargetBackwardItem item = {find_chunk(target, index / target.kv_heads),
                                     static_cast<int>(index % target.kv_heads)};
    const TargetChunk& chunk = item.chunk;
    if (!chunk.exists) continue;
    if (chunk.seq < 0) {
      const int64_t row = chunk.first_key * target.kv_heads + item.kv_head;
      store_zeros<32>(static_cast<Element*>(target.grad_k) + row * target.dim_qk,
                      int64_t{target.kv_heads} * target.dim_qk, chunk.keys, target.dim_qk);
      store_zeros<32>(static_cast<Element*>(target.grad_v) + row * target.dim_v,
                      int64_t{target.kv_heads} * target.dim_v, chunk.keys, target.dim_v);
      continue;
    }
    if (chunk.keys > 0) prefetch_target_rows(target, item, lane);
    if (lane == 0) {
      publish(item);
      for (int key = 0; key < chunk.keys; key += Config::kKeys) {
        shared.keys.acquire(stage);
        copy_tile(shared.sK[stage.stage], params.k, chunk.first_key + key, item.kv_head,
                  shared.keys.full[stage.stage], policy);
        shared.values.acquire(stage);
        copy_tile(shared.sV[stage.stage], params.v, chunk.first_key + key, item.kv_head,
                  shared.values.full[stage.stage], policy);
        stage.advance();
      }
    }
    __syncwarp();
  }
  if (lane == 0) publish(TargetBackwardItem{});
}

// One of two warpgroups that compute scores, dK and dV.
template <typename Config>
struct TargetScorer {
  using Element = typename Config::Element;
  using Storage = TargetBackwardWgmmaStorage<Config>;
  using QueryRows = typename Storage::QueryRows;
  using KeyRows = typename Storage::KeyRows;
  using Scores = typename Storage::Scores;
  static constexpr int kKeys = Config::kKeys, kParts = Config::kRows / 64;  // of 64 queries
  static constexpr int kPartBlocks = 8, kOutBlocks = Config::kDim / 8;
  static constexpr int kQueries = 1, kOwn = 2;

  const TargetBackwardWgmmaParams& params;
  const TargetAttentionBackwardParams& target;
  Storage& shared;
  const int warpgroup, warp;
  int lane;
  int sent_stage = -1;  // its place of V may still be read by the copies of dK

  __device__ __forceinline__ TargetScorer(const TargetBackwardWgmmaParams& kernel_params,
                                          Storage& storage, int own_warpgroup, int own_warp,
                                          int own_lane)
      : params(kernel_params),
        target(kernel_params.target),
        shared(storage),
        warpgroup(own_warpgroup),
        warp(own_warp),
        lane(own_lane) {}

  // The rows of an item, by both warpgroups.
  __device__ __forceinline__ void load_rows(int64_t seq, int kv_head) {
    constexpr int kThreads = Config::kScorers * 128;
    const TargetRows rows(target, seq, kv_head);
    ptx::bar_sync(kQueries, kThreads);
    load_query_rows<kThreads>(shared.sQ, target.q, rows, 0, rows.count(), target.dim_qk, true);
    load_query_rows<kThreads>(shared.sGradOut, target.grad_out, rows, 0, rows.count(), target.dim_v,
                              true);
    ptx::cp_async_commit();
    load_row_statistics<Element, kThreads, Config::kRows>(shared.sLse, shared.sDelta, target, rows,
                                                          (warpgroup * 4 + warp) * 32 + lane);
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::bar_sync(kQueries, kThreads);
  }

  // Fragments are complete from here on: nothing that computes them moves behind a fence.
  __device__ __forceinline__ static void pin(uint32_t (&fragments)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragments[i] = static_cast<uint32_t>(ptx::opaque(static_cast<int>(fragments[i])));
  }

  // s = a b^T for part `part` of the rows of b.
  __device__ __forceinline__ static void start_scores(Accumulator<1, kPartBlocks>& s,
                                                      const KeyRows& a, const QueryRows& b,
                                                      int part) {
    using Product = ptx::Wgmma<Element, false>;
    const ptx::MatrixDescriptor a_rows = a.descriptor(), b_rows = b.descriptor(part * 64);
    ptx::fence_operands(s[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kDim; k += 16) {
      Product::run(s[0], a_rows + KeyRows::column_step_bytes(k),
                   b_rows + QueryRows::column_step_bytes(k), k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // P^T of a part, from S^T.
  __device__ __forceinline__ void exponentiate(Accumulator<1, kPartBlocks>& s, int part) const {
    const float scale_log2 = target.scale * kLog2E;
    const float* lse = shared.sLse + part * 64 + lane % 4 * 2;
    ptx::fence_operands(s[0]);
#pragma unroll
    for (int block = 0; block < kPartBlocks; ++block) {
      const float2 own = *reinterpret_cast<const float2*>(lse + block * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[0][block][i];
        score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, i % 2 == 0 ? -own.x : -own.y));
      }
    }
    ptx::fence_operands(s[0]);
  }

  // This part of P^T as an operand, and of dS^T, whose first `keys` rows of this warp exist, to shared
  // memory.
  __device__ __forceinline__ void write_scores(PackedRows<Element, kPartBlocks>& p,
                                               Accumulator<1, kPartBlocks>& s,
                                               Accumulator<1, kPartBlocks>& dp, int part,
                                               int keys) const {
    const float* delta = shared.sDelta + part * 64 + lane % 4 * 2;
    ptx::fence_operands(dp[0]);
    PackedRows<Element, kPartBlocks> ds;
#pragma unroll
    for (int block = 0; block < kPartBlocks; ++block) {
      const float2 own = *reinterpret_cast<const float2*>(delta + block * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float probs[2] = {s[0][block][2 * half], s[0][block][2 * half + 1]};
        const float grads[2] = {probs[0] * (dp[0][block][2 * half] - own.x),
                                probs[1] * (dp[0][block][2 * half + 1] - own.y)};
        p.set(block, half, probs);
        ds.set(block, half, grads);
      }
    }
    if (keys < 16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kPartBlocks; ++block) {
          if (lane / 4 + half * 8 >= keys) ds.fragments[block / 2][block % 2 * 2 + half] = 0;
        }
      }
    }
    const uint32_t row = ptx::shared_address(shared.sDs[warpgroup].data) +
                         part * Scores::kGroupBytes + (warp * 16 + lane % 16) * Scores::kRowBytes;
#pragma unroll
    for (int k = 0; k < kPartBlocks / 2; ++k)
      ptx::stmatrix_x4(row + ((2 * k + lane / 16) ^ (lane & 7)) * Scores::kChunkBytes,
                       ds.fragments[k]);
  }

  // dV = P^T dO
  __device__ __forceinline__ void start_grad_v(
      Accumulator<1, kOutBlocks>& sum, PackedRows<Element, kPartBlocks> (&p)[kParts]) const {
    using Product = ptx::Wgmma<Element, true>;
    const ptx::MatrixDescriptor b_rows = shared.sGradOut.descriptor();
    ptx::fence_operands(sum[0]);
#pragma unroll
    for (int k = 0; k < Config::kRows; k += 16) pin(p[k / 64].fragments[k % 64 / 16]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kRows; k += 16) {
      Product::run(sum[0], p[k / 64].fragments[k % 64 / 16], b_rows + QueryRows::row_step_bytes(k),
                   k > 0);
    }
    ptx::wgmma_commit_group();
  }
  // dK = dS^T Q
  __device__ __forceinline__ void start_grad_k(Accumulator<1, kOutBlocks>& sum) const {
    using Product = ptx::Wgmma<Element, true>;
    const ptx::MatrixDescriptor a_rows = shared.sDs[warpgroup].descriptor(),
                                b_rows = shared.sQ.descriptor();
    ptx::fence_operands(sum[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kRows; k += 16) {
      Product::run(sum[0], a_rows + Scores::column_step_bytes(k),
                   b_rows + QueryRows::row_step_bytes(k), k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // dV or dK of this warp's 16 keys from `first_key` on, of which `keys` exist, on its way from a tile.
  __device__ __forceinline__ void send(const CUtensorMap& map, void* grad, KeyRows& tile,
                                       int first_key, int kv_head, int keys, int columns) const {
    if (keys >= kStoredRows) {
      send_rows(map, tile, warp * 16, first_key, kv_head, lane);
      return;
    }
    __syncwarp();
    const int chunk = lane % KeyRows::kChunks;
    auto* g = static_cast<Element*>(grad) + chunk * KeyRows::kChunkElems;
#pragma unroll 1
    for (int row = lane / KeyRows::kChunks; row < keys; row += 32 / KeyRows::kChunks) {
      if (chunk * KeyRows::kChunkElems >= columns) break;
      const int64_t index = (int64_t{first_key} + row) * target.kv_heads + kv_head;
      *reinterpret_cast<uint4*>(g + index * columns) =
          *reinterpret_cast<const uint4*>(tile.chunk(warp * 16 + row, chunk));
    }
    ptx::fence_proxy_async();  // before bulk copies write there
  }

  // The place of V of the tile before, which copies have read by now.
  __device__ __forceinline__ void release_sent() const {
    if (sent_stage < 0) return;
    if (lane == 0) ptx::cp_async_bulk_wait_read();
    shared.values.release(sent_stage);
  }

  // Tile number `tile` of the CTA: of the keys from `first_key` on, `keys` exist.
  __device__ __forceinline__ void compute(int tile, int first_key, int keys, int kv_head) {
    const int stage = tile % Config::kStages, parity = tile / Config::kStages % 2,
              own_keys = keys - warp * 16;
    lane = ptx::opaque(lane);  // addresses made of it are made again, not kept: registers are few
    KeyRows &sK = shared.sK[stage], &sV = shared.sV[stage];
    Accumulator<1, kPartBlocks> s[kParts], dp[kParts];  // S^T and dP^T
    PackedRows<Element, kPartBlocks> p[kParts];
    ptx::mbarrier_wait(shared.keys.full[stage], parity);
    start_scores(s[0], sK, shared.sQ, 0);
    ptx::mbarrier_wait(shared.values.full[stage], parity);
    start_scores(dp[0], sV, shared.sGradOut, 0);
    if constexpr (kParts == 2) start_scores(s[1], sK, shared.sQ, 1);
    ptx::wgmma_wait_group<kParts>();
    exponentiate(s[0], 0);
    if constexpr (kParts == 1) release_sent();
    ptx::mbarrier_wait(shared.scores.empty[warpgroup], tile / Config::kScorers % 2 ^ 1);
    ptx::wgmma_wait_group<kParts - 1>();
    write_scores(p[0], s[0], dp[0], 0, own_keys);
    if constexpr (kParts == 2) {
      start_scores(dp[1], sV, shared.sGradOut, 1);
      ptx::wgmma_wait_group<1>();
      exponentiate(s[1], 1);
      release_sent();
      ptx::wgmma_wait_group<0>();
      write_scores(p[1], s[1], dp[1], 1, own_keys);
    }
    Accumulator<1, kOutBlocks> sum;
    start_grad_v(sum, p);
    ptx::fence_proxy_async();
    ptx::bar_sync(kOwn + warpgroup, 128);
    if (keys < kKeys) {
      zero_tile_rows<128>(sK, keys, kKeys, threadIdx.x % 128);
      ptx::fence_proxy_async();
    }
    shared.scores.publish(warpgroup);

    const int own_key = first_key + warp * 16;
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum[0]);
    write_rows(sV, warp * 16, sum, {1.0f, 1.0f}, lane);
    start_grad_k(sum);
    send(params.grad_v, target.grad_v, sV, own_key, kv_head, own_keys, target.dim_v);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum[0]);
    shared.scores.release(warpgroup);
    if (lane == 0) ptx::cp_async_bulk_wait_read();
    __syncwarp();
    write_rows(sV, warp * 16, sum, {target.scale, target.scale}, lane);
    send(params.grad_k, target.grad_k, sV, own_key, kv_head, own_keys, target.dim_qk);
    sent_stage = stage;
  }

  __device__ __forceinline__ void run() {
    int tile = 0;  // of all that the CTA takes
    for (int number = 0;; ++number) {
      const TargetBackwardItem item = shared.take(number);
      const int keys = item.chunk.keys, first_key = static_cast<int>(item.chunk.first_key);
      if (!item.chunk.exists) break;
      if (keys == 0) continue;
      load_rows(item.chunk.seq, item.kv_head);
#pragma unroll 1
      for (int key = (warpgroup ^ tile % 2) * kKeys; key < keys; key += 2 * kKeys)
        compute(tile + key / kKeys, first_key + key, keys - key, item.kv_head);
      tile += (keys + kKeys - 1) / kKeys;
    }
    if (lane == 0) ptx::cp_async_bulk_wait_read();
  }
};

// The warpgroup that sums dQ.
template <typename Config>
__device__ __forceinline__ void sum_target_queries(const TargetAttentionBackwardParams& params,
                                                   TargetBackwardWgmmaStorage<Config>& shared,
                                                   int warp, int lane) {
  using Element = typename Config::Element;
  using Storage = TargetBackwardWgmmaStorage<Config>;
  using Scores = typename Storage::Scores;
  using Product = ptx::Wgmma<Element, true, true>;
  constexpr int kParts = Config::kRows / 64, kOutBlocks = Config::kDim / 8;
  int tile = 0;  // of all that the CTA takes
  for (int number = 0;; ++number) {
    const TargetBackwardItem item = shared.take(number);
    const TargetChunk& chunk = item.chunk;
    if (!chunk.exists) return;
    Accumulator<1, kOutBlocks> dq[kParts] = {};
#pragma unroll 1
    for (int key = 0; key < chunk.keys; key += Config::kKeys, ++tile) {
      const int from = tile % Config::kScorers, stage = tile % Config::kStages;
      shared.scores.wait({from, tile / Config::kScorers % 2});
      const ptx::MatrixDescriptor a = shared.sDs[from].descriptor(),
                                  b = shared.sK[stage].descriptor();
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::fence_operands(dq[part][0]);
      ptx::wgmma_fence();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int k = 0; k < Config::kKeys; k += 16) {
          Product::run(dq[part][0], a + (part * Scores::kGroupBytes + Scores::row_step_bytes(k)),
                       b + Storage::KeyRows::row_step_bytes(k), true);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::fence_operands(dq[part][0]);
      shared.scores.release(from);
      shared.keys.release(stage);
    }

    lane = ptx::opaque(lane);
    const TargetRows target(params, chunk.seq, item.kv_head);
    const bool whole = chunk.whole || params.parts == nullptr;
    const float scale[2] = {params.scale, params.scale};
    const auto store = [&](const Accumulator<1, kOutBlocks>& sum, int first_row) {
      const int own_row = first_row + warp * 16 + lane / 4, rows = target.count() - own_row;
      if (whole) {
        // Of the rows of a lane the second is the eighth behind the first, at whatever distance.
        const int64_t first = target.index(own_row), second = target.index(own_row + 8);
        store_quads(sum, scale, static_cast<Element*>(params.grad_q) + first * params.dim_qk,
                    (second - first) * (params.dim_qk / 8), rows, params.dim_qk, lane);
      } else {
        const int64_t first = part_row(params, chunk.slot, item.kv_head, own_row);
        store_pairs(sum, scale, params.parts + first * params.dim_qk, params.dim_qk, rows,
                    params.dim_qk, lane);
      }
    };
    store(dq[0], 0);
    if constexpr (kParts == 2) store(dq[1], 64);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void target_backward_wgmma(
    const __grid_constant__ TargetBackwardWgmmaParams params) {
  using Storage = TargetBackwardWgmmaStorage<Config>;
  static_assert(sizeof(Storage) <= 227 * 1024);
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    shared.init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0),
            lane = threadIdx.x % 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp == 0) produce_target_keys<Config>(params, shared, lane);
  } else if (warp < 4 + Config::kScorers * 4) {
    ptx::setmaxnreg_inc<Config::kScorerRegisters>();
    TargetScorer<Config>(params, shared, warp / 4 - 1, warp % 4, lane).run();
  } else {
    ptx::setmaxnreg_inc<Config::kSumRegisters>();
    sum_target_queries<Config>(params.target, shared, warp % 4, lane);
  }
}

// cudaErrorNotSupported where one of the tensors has no tensor map.
template <typename Config>
cudaError_t launch_target_backward_wgmma(const TargetAttentionBackwardParams& given,
                                         cudaStream_t stream) {
  TargetBackwardWgmmaParams params;
  params.target = given;
  params.target.chunk_log2 = kTargetWgmmaChunkLog2;  // as forward
  const TargetAttentionBackwardParams& target = params.target;
  params.items = target_grid(target, 1).x;
  const auto encode = [&](CUtensorMap& map, const HeadsView& view, int dims, int box_rows) {
    return encode_tensor_map(map,
                             {view.data, target.type, target.offsets.total, target.kv_heads, dims,
                              view.row_stride, view.head_stride},
                             box_rows, TargetBackwardWgmmaStorage<Config>::KeyRows::kBlockColumns);
  };
  const auto contiguous = [&](void* data, int dims) {
    return HeadsView{data, int64_t{target.kv_heads} * dims, dims};
  };
  for (cudaError_t error :
       {encode(params.k, target.k, target.dim_qk, Config::kKeys),
        encode(params.v, target.v, target.dim_v, Config::kKeys),
        encode(params.grad_k, contiguous(target.grad_k, target.dim_qk), target.dim_qk, kStoredRows),
        encode(params.grad_v, contiguous(target.grad_v, target.dim_v), target.dim_v,
               kStoredRows)}) {
    if (error != cudaSuccess) return error;
  }
  const cudaError_t launched = launch_target_items<target_backward_wgmma<Config>>(
      params, Config::kThreads, sizeof(TargetBackwardWgmmaStorage<Config>), stream, Config::kName);
  if (launched != cudaSuccess) return launched;
  return launch_merge<merge_backward<typename Config::Element>>(target, stream);
}

// Head dims of 65 to 128: from fewer rows on than forward. With less than half of a tile it is still no
// slower than mma.sync, since its bytes take longer.
inline bool takes_target_backward_wgmma(const TargetAttentionBackwardParams& params) {
  constexpr int64_t kWideRows = kPersistentTargetRows;
  return takes_target_wgmma(params, dim_bucket(params) == 128 ? kWideRows : kTargetWgmmaRows);
}

template <typename Element>
cudaError_t launch_target_backward(const TargetAttentionBackwardParams& params,
                                   cudaStream_t stream) {
  if (takes_target_backward_wgmma(params)) {
    const cudaError_t error = for_dim<128>(params, [&](auto dim) {
      if constexpr (dim.value < 64) {
        return cudaErrorNotSupported;
      } else {
        using Some = TargetBackwardWgmmaConfig<Element, dim.value, 64>;
        using Many = TargetBackwardWgmmaConfig<Element, dim.value, 128>;
        return target_rows(params) <= 64 ? launch_target_backward_wgmma<Some>(params, stream)
                                         : launch_target_backward_wgmma<Many>(params, stream);
      }
    });
    if (error != cudaErrorNotSupported) return error;
  }
  return launch_target_backward_mma_sync<Element>(params, stream);
}

}  // namespace jagged_cuda::attention
