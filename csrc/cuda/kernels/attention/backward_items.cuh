// Backward of jagged_flash_attention for head dims of 65 to 128 on wgmma and TMA (compute capability 9.0),
// 16-bit elements, where there are many tiles. Mathematics and kernels are those of backward_wgmma.cuh.
//
// A tile of 64 rows takes 2,250 to 3,000 cycles a step, and one that starts in a CTA of its own 7,000 to
// 8,000 more before its first product and behind its last. So CTAs stay, one per SM: two warpgroups compute, each its
// own items (a tile of 64 rows of a head) with its own part of shared memory; for each of them a warp takes
// items as they come, finds their rows, and copies ahead.
//
//     producing warp                               computing warpgroup
//     for each item:                               for each item:
//       take it, find its rows, publish it           dq: delta
//       its own rows: Q, dO; or K, V                 for each step, as in backward_bulk.cuh's dkdv:
//       for each step: K, V;                           S, dP, P, dS
//         or Q, dO, lse, delta                         dQ += dS K; or dV += P^T dO, dK += dS^T Q
//                                                    gradients leave by bulk copies
//
// Shared memory of a warpgroup, in tiles of 64 rows of 256 bytes: its own two, three of K (Q) and two of V
// (dO), 112 KiB; lse and delta of two steps. Gradients leave through the places of the last step's V, or Q
// and dO, so that the next item's own rows come in meanwhile.
//
// Barriers of each warpgroup:  arrives                          waits
//     item_full                producing lane, it is described  warpgroup
//     item_empty               128 threads, when they know it   producing lane
//     own_full                 producing lane, with the bytes   warpgroup
//     own_empty                128 threads, after the item's    producing lane
//                              last S and dP
//     ring.full                producing lane, with the bytes;  warpgroup
//                              of dO, all lanes of the warp,
//                              with their cp.async
//     ring.empty               128 threads, after the last      producing warp
//                              product, or the copy that
//                              leaves from there
//     1 + w                    warpgroup w: zeros are written; no product reads the place through which
//                              gradients leave
//
// Which warpgroup takes an item changes no bit: an item's sums have the order of its steps. Rows past the
// end, and outside all sequences, are treated as in backward_bulk.cuh.
#pragma once

#include "cuda/kernels/attention/backward_bulk.cuh"
#include "cuda/kernels/prim/ring.cuh"

namespace jagged_cuda::attention {

constexpr int kItemWarpgroups = 2;  // of a CTA, that compute

template <typename Element_>
struct ItemsBackwardConfig {
  using Element = Element_;
  static constexpr int kThreads = 128 * (kItemWarpgroups + 1);
  // 128 (producers) + 256 (consumers) of what the launch gives each of 384 threads. Those of dkdv keep two
  // sums; its producers spill instead.
  static constexpr int kDqProducerRegisters = 40, kDqConsumerRegisters = 232;
  static constexpr int kDkdvProducerRegisters = 24, kDkdvConsumerRegisters = 240;
  static constexpr PathName kName =
      PathName("cuda.attention.backward.wgmma.d") + kBulkDim + ".items";
};

// The barriers of a warpgroup and of the warp that works for it.
template <bool kKeys>
struct ItemsBarriers {
  uint64_t item_full[2], item_empty[2], own_full, own_empty;
  Ring<3> first_ring;   // of K, or of Q
  Ring<2> second_ring;  // of V, or of dO
  BulkItem<kKeys> items[2];

  __device__ __forceinline__ void init(int second_fillers) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(item_full[i], 1);
      ptx::mbarrier_init(item_empty[i], 128);
    }
    ptx::mbarrier_init(own_full, 1);
    ptx::mbarrier_init(own_empty, 128);
    first_ring.init(128);
    second_ring.init(128, second_fillers);
  }
  // One lane: the `count`-th item.
  __device__ __forceinline__ void publish(const BulkItem<kKeys>& item, int count) {
    ptx::mbarrier_wait(item_empty[count % 2], count / 2 % 2 ^ 1);
    items[count % 2] = item;
    ptx::mbarrier_arrive(item_full[count % 2]);
  }
  // The warpgroup.
  __device__ __forceinline__ BulkItem<kKeys> receive(int count) {
    ptx::mbarrier_wait(item_full[count % 2], count / 2 % 2);
    const BulkItem<kKeys> item = items[count % 2].uniform();
    ptx::mbarrier_arrive(item_empty[count % 2]);
    return item;
  }
};

template <typename Element>
struct DqItemsStorage {
  struct Tiles {
    BulkTile<Element> sQ, sGradOut, sK[3], sV[2];
  } tiles[kItemWarpgroups];
  ItemsBarriers<false> barriers[kItemWarpgroups];
};

template <typename Element>
struct DkdvItemsStorage {
  struct Tiles {
    BulkTile<Element> sK, sV, sQ[3], sGradOut[2];
  } tiles[kItemWarpgroups];
  StepStatistics statistics[kItemWarpgroups][2];
  ItemsBarriers<true> barriers[kItemWarpgroups];
};

// Tiles of all heads, heads fastest, as warps take them.
template <bool kKeys>
class ItemTaker {
 public:
  __device__ __forceinline__ ItemTaker(const AttentionBackwardParams& params)
      : params_(params), heads_(kKeys ? params.kv_heads : params.heads) {
    const OffsetsView& offsets = own_offsets();
    num_items_ = static_cast<int>(offsets.total / kBulkRows + offsets.num_seqs + 2) * heads_;
  }
  // The next item that has rows; one without where there are no more. All lanes of a warp.
  __device__ __forceinline__ BulkItem<kKeys> next() {
    for (;;) {
      int index = 0;
      if (threadIdx.x % 32 == 0) index = atomicAdd(params_.next_item + (kKeys ? 1 : 0), 1);
      index = __shfl_sync(0xffffffffu, index, 0);
      if (index >= num_items_) return BulkItem<kKeys>();
      const int tile = index / heads_;
      if (tile != tile_) found_ = find_any_tile<kBulkRows>(own_offsets(), tile);
      tile_ = tile;
      const BulkItem<kKeys> item(params_, found_, index - tile * heads_);
      if (item.rows > 0) return item;
    }
  }

 private:
  __device__ __forceinline__ const OffsetsView& own_offsets() const {
    return kKeys ? params_.kv_offsets : params_.q_offsets;
  }

  const AttentionBackwardParams& params_;
  int heads_, num_items_, tile_ = -1;
  JaggedTile found_;
};

template <typename Element>
__device__ __forceinline__ void produce_dq(const BulkBackwardParams& params,
                                           DqItemsStorage<Element>& storage, int warpgroup) {
  auto& tiles = storage.tiles[warpgroup];
  auto& barriers = storage.barriers[warpgroup];
  const AttentionBackwardParams& attention = params.attention;
  const bool copies = threadIdx.x % 32 == 0;
  ItemTaker<false> items(attention);
  Ring<3>::Position keys;
  Ring<2>::Position values;
  for (int count = 0;; ++count) {
    const BulkItem<false> item = items.next();
    if (copies) barriers.publish(item, count);
    if (item.rows == 0) return;
    if (copies) {
      const int kv_head = item.head / (attention.heads / attention.kv_heads);
      ptx::mbarrier_wait(barriers.own_empty, count % 2 ^ 1);
      copy_pair(tiles.sQ, params.q, tiles.sGradOut, params.grad_out, item.global_row, item.head,
                barriers.own_full);
      for (int step = 0; step < item.steps; ++step) {
        const int key = item.other_begin + item.first + step * kBulkRows;
        barriers.first_ring.acquire(keys);
        copy_tile(tiles.sK[keys.stage], params.k, key, kv_head,
                  barriers.first_ring.full[keys.stage]);
        keys.advance();
        barriers.second_ring.acquire(values);
        copy_tile(tiles.sV[values.stage], params.v, key, kv_head,
                  barriers.second_ring.full[values.stage]);
        values.advance();
      }
    }
    __syncwarp();
  }
}

template <typename Element>
__device__ __forceinline__ void consume_dq(const BulkBackwardParams& params,
                                           DqItemsStorage<Element>& storage, int warpgroup) {
  const AttentionBackwardParams& attention = params.attention;
  auto& tiles = storage.tiles[warpgroup];
  auto& barriers = storage.barriers[warpgroup];
  const BulkThread own(attention, threadIdx.x % 128, 1 + warpgroup);
  Ring<3>::Position keys;
  Ring<2>::Position values;
  for (int count = 0;; ++count) {
    const BulkItem<false> item = barriers.receive(count);
    if (item.rows == 0) return;
    QueryStatistics<Element> statistics(attention, item.global_row, item.head,
                                        item.seq < 0 ? 0 : item.rows, own.thread);
    ptx::mbarrier_wait(barriers.own_full, count % 2);
    statistics.sum_delta(tiles.sGradOut);
    if (item.steps == 0) {
      ptx::mbarrier_arrive(barriers.own_empty);
      zero_gradient<Element>(attention.grad_q, item.global_row, item.head, item.rows,
                             attention.dim_qk, own.thread);
      continue;
    }
    const WindowOf<int> window = item.window(attention);
    BulkSums dq = {};
    for (int step = 0; step < item.steps; ++step) {
      const int key = item.first + step * kBulkRows;
      auto& sK = tiles.sK[keys.stage];
      barriers.first_ring.wait(keys);
      if (key + kBulkRows > item.num_other) own.zero_rows_from(sK, item.num_other - key);
      BulkScores s, dp;
      ptx::wgmma_fence();
      wgmma_rows_by_rows<0, true>(s, tiles.sQ, 0, sK);
      ptx::wgmma_commit_group();
      barriers.second_ring.wait(values);
      ptx::wgmma_fence();
      wgmma_rows_by_rows<0, true>(dp, tiles.sGradOut, 0, tiles.sV[values.stage]);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::fence_operands(s[0]);
      statistics.exponentiate(s, own.scale_log2);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp[0]);
      if (step + 1 < item.steps) {
        barriers.second_ring.release(values.advance());
      } else {
        ptx::mbarrier_arrive(barriers.own_empty);
      }
      statistics.multiply(s, dp);
      if (window.cuts_tile(item.row, kBulkRows, key, kBulkRows, item.num_other))
        replace_unseen(s, 0.0f, window, item.row + own.warp_row + own.lane / 4, key, item.num_other,
                       own.lane);
      const PackedRows<Element, kBulkRows / 8> ds(s);
      ptx::fence_operands(dq[0]);
      ptx::wgmma_fence();
      wgmma_packed_by_columns<true>(dq, ds, sK);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dq[0]);
      barriers.first_ring.release(keys.advance());
    }
    ptx::bar_sync(own.barrier, 128);  // no warp's product reads the last V any more
    send_gradient<Element>(tiles.sV[values.stage], own.warp_row, params.grad_q, attention.grad_q,
                           dq, own.scale, item.global_row, item.head, item.rows, attention.dim_qk,
                           own.lane);
    if (own.lane == 0) ptx::cp_async_bulk_wait_read();
    __syncwarp();
    barriers.second_ring.release(values.advance());
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_dq_items(
    const __grid_constant__ BulkBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DqItemsStorage<typename Config::Element>*>(wgmma_shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& barriers : shared.barriers) barriers.init(1);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kDqProducerRegisters>();
    ptx::griddepcontrol_wait();  // the counter is cleared
    if (threadIdx.x / 32 < kItemWarpgroups) produce_dq(params, shared, threadIdx.x / 32);
  } else {
    ptx::setmaxnreg_inc<Config::kDqConsumerRegisters>();
    consume_dq(params, shared, warpgroup - 1);
  }
}

template <typename Element>
__device__ __forceinline__ void produce_dkdv(const BulkBackwardParams& params,
                                             DkdvItemsStorage<Element>& storage, int warpgroup) {
  auto& tiles = storage.tiles[warpgroup];
  auto& barriers = storage.barriers[warpgroup];
  const AttentionBackwardParams& attention = params.attention;
  const int lane = threadIdx.x % 32;
  const bool copies = lane == 0;
  ItemTaker<true> items(attention);
  Ring<3>::Position queries;
  Ring<2>::Position gradients;
  for (int count = 0;; ++count) {
    const BulkItem<true> item = items.next();
    if (copies) barriers.publish(item, count);
    if (item.rows == 0) return;
    if (copies) {
      ptx::mbarrier_wait(barriers.own_empty, count % 2 ^ 1);
      copy_pair(tiles.sK, params.k, tiles.sV, params.v, item.global_row, item.head,
                barriers.own_full);
    }
    __syncwarp();
    QuerySteps place(attention, item);
    for (int step = 0; step < item.steps; ++step, place.advance()) {
      const int first = item.other_begin + place.query;
      barriers.first_ring.acquire(queries);
      if (copies)
        copy_tile(tiles.sQ[queries.stage], params.q, first, place.head,
                  barriers.first_ring.full[queries.stage]);
      queries.advance();
      barriers.second_ring.acquire(gradients);
      uint64_t& full = barriers.second_ring.full[gradients.stage];
      if (copies)
        copy_tile(tiles.sGradOut[gradients.stage], params.grad_out, first, place.head, full);
      __syncwarp();
      for (int index = lane; index < 2 * kBulkRows; index += 32)
        storage.statistics[warpgroup][gradients.stage].copy(attention, index, first, place.head,
                                                            item.num_other - place.query);
      ptx::cp_async_mbarrier_arrive(full);
      gradients.advance();
    }
  }
}

template <typename Element>
__device__ __forceinline__ void consume_dkdv(const BulkBackwardParams& params,
                                             DkdvItemsStorage<Element>& storage, int warpgroup) {
  const AttentionBackwardParams& attention = params.attention;
  auto& tiles = storage.tiles[warpgroup];
  auto& barriers = storage.barriers[warpgroup];
  const BulkThread own(attention, threadIdx.x % 128, 1 + warpgroup);
  Ring<3>::Position queries;
  Ring<2>::Position gradients;
  for (int count = 0;; ++count) {
    const BulkItem<true> item = barriers.receive(count);
    if (item.rows == 0) return;
    ptx::mbarrier_wait(barriers.own_full, count % 2);
    if (item.steps == 0) {
      ptx::mbarrier_arrive(barriers.own_empty);
      KeySums<Element>::zero(own, attention, item);
      continue;
    }
    const WindowOf<int> window = item.window(attention);
    QuerySteps place(attention, item);
    KeySums<Element> sums;
    for (int step = 0; step < item.steps; ++step, place.advance()) {
      const int query = place.query;
      auto& sQ = tiles.sQ[queries.stage];
      auto& sGradOut = tiles.sGradOut[gradients.stage];
      barriers.first_ring.wait(queries);
      barriers.second_ring.wait(gradients);
      if (query + kBulkRows > item.num_other) {
        own.zero_rows_from(sQ, item.num_other - query);
        own.zero_rows_from(sGradOut, item.num_other - query);
      }
      const auto give_back = [&] {
        if (step + 1 == item.steps) ptx::mbarrier_arrive(barriers.own_empty);
      };
      sums.add(
          own, item, window, query, tiles.sK, tiles.sV, sQ, sGradOut,
          storage.statistics[warpgroup][gradients.stage], [] {}, give_back);
      if (step + 1 == item.steps) break;
      barriers.first_ring.release(queries.advance());
      barriers.second_ring.release(gradients.advance());
    }
    ptx::bar_sync(own.barrier, 128);  // no warp's product reads the last Q and dO any more
    sums.send(own, params, item, tiles.sGradOut[gradients.stage], tiles.sQ[queries.stage]);
    __syncwarp();
    barriers.second_ring.release(gradients.advance());
    barriers.first_ring.release(queries.advance());
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void backward_dkdv_items(
    const __grid_constant__ BulkBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DkdvItemsStorage<typename Config::Element>*>(wgmma_shared_bytes);
  if (threadIdx.x == 0) {
    for (auto& barriers : shared.barriers) barriers.init(1 + 32);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();  // the plan of the kernel for long sequences
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kDkdvProducerRegisters>();
    // For delta. The last warp always waits, so that this kernel does not end before the one in front.
    if (!params.attention.dkdv_is_last || threadIdx.x >= 96) ptx::griddepcontrol_wait();
    if (threadIdx.x / 32 < kItemWarpgroups) produce_dkdv(params, shared, threadIdx.x / 32);
  } else {
    ptx::setmaxnreg_inc<Config::kDkdvConsumerRegisters>();
    consume_dkdv(params, shared, warpgroup - 1);
  }
}

struct ClearItemCountsParams {
  int* next_item;
};

// Clears the counters of both kernels; one thread. (A template, since files that include this are linked
// together.)
template <typename>
__global__ void clear_item_counts(const __grid_constant__ ClearItemCountsParams params) {
  ptx::griddepcontrol_launch_dependents();
  params.next_item[0] = params.next_item[1] = 0;
  ptx::griddepcontrol_wait();  // launch_longer
}

// Whether tiles are so many that those who take them one after another are ahead: on an H200 from 2,000 to
// 2,600 tiles of all heads on (docs/performance_log.md). Where most are those of long sequences, which have a
// kernel of their own, the warps would look for the others one by one.
inline bool has_many_tiles(const AttentionBackwardParams& params, const OffsetsView& offsets,
                           int heads) {
  constexpr int64_t kManyTiles = 2112, kMost = int64_t{1} << 30;
  const int64_t tiles = num_tiles(offsets.total, offsets.num_seqs, kBulkRows) * heads;
  const bool are_long = params.long_plan != nullptr &&  // on average
                        params.q_offsets.total > params.q_offsets.num_seqs * long_rows(params);
  return params.next_item != nullptr && !are_long && tiles >= kManyTiles && tiles < kMost;
}

template <typename Element>
cudaError_t launch_backward_bulk(const AttentionBackwardParams& attention, BackwardPart part,
                                 cudaStream_t stream) {
  using Config = ItemsBackwardConfig<Element>;
  using DqStorage = DqItemsStorage<Element>;
  using DkdvStorage = DkdvItemsStorage<Element>;
  static_assert(sizeof(DqStorage) <= 227 * 1024 && sizeof(DkdvStorage) <= 227 * 1024);
  BulkBackwardParams params;
  params.attention = attention;
  int num_sms = 0;
  cudaError_t error = encode_bulk_maps<Element>(params);
  if (error == cudaSuccess) error = count_sms(num_sms);
  const bool many_queries = has_many_tiles(attention, attention.q_offsets, attention.heads),
             many_keys = has_many_tiles(attention, attention.kv_offsets, attention.kv_heads);
  if (error == cudaSuccess && part != BackwardPart::kDkdv) {
    if (many_queries || many_keys)
      error = launch_behind<clear_item_counts<void>>(attention.split_by_length,
                                                     ClearItemCountsParams{attention.next_item},
                                                     Grid{1}, 1, 0, stream, nullptr);
    if (error == cudaSuccess)
      error = many_queries ? launch_dependent<backward_dq_items<Config>>(
                                 params, Grid{num_sms}, Config::kThreads, sizeof(DqStorage), stream,
                                 Config::kName)
                           : launch_dq_bulk<Element>(params, many_keys, stream);
  }
  if (error != cudaSuccess || part == BackwardPart::kDq) return error;
  return many_keys ? launch_dependent<backward_dkdv_items<Config>>(
                         params, Grid{num_sms}, Config::kThreads, sizeof(DkdvStorage), stream)
                   : launch_dkdv_bulk<Element>(params, stream);
}

}  // namespace jagged_cuda::attention
