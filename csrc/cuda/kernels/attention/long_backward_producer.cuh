// The producers of the backward kernel for long sequences (long_backward.cuh): the scheduler takes
// items, the copier brings operands, and where tiles of keys add to dQ in order a sender for each
// computing warpgroup adds what that has computed.
#pragma once

#include "cuda/kernels/attention/long_backward_steps.cuh"

namespace jagged_cuda::attention {

// How many sequences and heads later the other tiles of keys of one come than its first, which they
// wait for.
__device__ __forceinline__ int first_tiles_ahead(const AttentionBackwardParams& attention,
                                                 const PlannedItems& items) {
  const int64_t units = items.num_units(), ctas = gridDim.x;
  return static_cast<int>(ctas < units ? ctas : units);
}

// Takes items from the plan; one warp.
template <typename Config>
__device__ __forceinline__ void schedule_keys(const LongBackwardOperands& params,
                                              LongBackwardStorage<Config>& shared) {
  const AttentionBackwardParams& attention = params.attention;
  RingPosition<LongBackwardStorage<Config>::kItems> place;
  const auto publish = [&](const KeyItem& item) {
    publish_item(shared.items, place, shared.item, item);
  };
  PlannedItems items(static_cast<LongPlan*>(attention.long_plan), attention.kv_heads);
  PlannedSequence sequence;
  int64_t index = 0;
  int tile = 0, head = 0, wanted_parity = 1;
  const bool stores = first_tile_stores<Config>(attention);
  const int ahead = stores ? first_tiles_ahead(attention, items) : 0;
  for (;;) {
    if constexpr (Config::kOrdered) {
      ptx::mbarrier_wait(shared.wanted, wanted_parity);
      if (!items.next_apart(sequence, tile, head)) break;
    } else if (stores) {
      if (!items.template next_first_ahead<Config::kTileN>(sequence, tile, head, ahead)) break;
    } else {
      if (!items.next(sequence, index)) break;
    }
    const RowRange kv = attention.kv_offsets.data == attention.q_offsets.data
                            ? RowRange{sequence.begin, sequence.num_queries}
                            : sequence_rows(attention.kv_offsets, sequence.seq);
    const int num_keys = static_cast<int>(kv.len);
    const int tiles = (num_keys + Config::kTileN - 1) / Config::kTileN;
    if (!Config::kOrdered && !stores) {
      tile = static_cast<int>(index % tiles);
      head = static_cast<int>(index / tiles);
    }
    KeyItem item;
    item.key = (keys_fall(attention) ? tiles - 1 - tile : tile) * Config::kTileN;
    item.query_begin = sequence.begin;
    item.first_unit = LongWorkspace<Config>::first_unit(attention, sequence.begin, sequence.seq);
    item.key_begin = static_cast<int>(kv.begin) + item.key;
    item.keys = min(Config::kTileN, num_keys - item.key);
    item.num_queries = sequence.num_queries;
    item.num_keys = num_keys;
    item.kv_head = head;
    item.is_end = false;
    item.joins = !stores ? JoinsSums::kAdds : tile == 0 ? JoinsSums::kStores : JoinsSums::kWaits;
    const StepOrder<Config> order(attention, item);
    item.first_step = order.count() > 0 ? order.flags(item, 0, 0) : 0;
    publish(item);
    wanted_parity ^= 1;
  }
  KeyItem end = {};
  end.is_end = true;
  publish(end);
}

// Waits until the first tile of keys has stored its dQ; one thread.
template <typename Config>
__device__ __forceinline__ void wait_for_first_tile(const AttentionBackwardParams& attention,
                                                    const KeyItem& item) {
  const int* ticket = LongWorkspace<Config>::item_ticket(attention, item);
  while (ptx::ld_acquire_gpu(ticket) < Config::kWarpgroups * 4) {
  }
  ptx::fence_proxy_async();
}

// Copies what the items need, in the order of its use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_steps(const LongBackwardOperands& params,
                                           LongBackwardStorage<Config>& shared) {
  using Storage = LongBackwardStorage<Config>;
  using Workspace = LongWorkspace<Config>;
  constexpr int kStepsAhead = 3;
  const AttentionBackwardParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kStages> slot;
  int keys_parity = 1;  // of K and of V
  for (;;) {
    shared.items.wait(place);
    const KeyItem item = shared.item[place.stage];
    shared.items.release(place.advance());
    if (item.is_end) return;
    const StepOrder<Config> order(attention, item);
    int steps_left = group * order.count();
    if (!Config::kOrdered && steps_left > 0 && item.joins == JoinsSums::kWaits)
      wait_for_first_tile<Config>(attention, item);
    if (Config::kOrdered && steps_left == 0) ptx::mbarrier_arrive(shared.wanted);
    for (int member = 0; member < group; ++member) {
      const int head = item.kv_head * group + member;
      for (int i = 0; i < order.count(); ++i) {
        const int query = order.query(i);
        // The next item is taken as late as it can be: until then others may take it.
        if (Config::kOrdered &&
            (steps_left == kStepsAhead || (steps_left < kStepsAhead && member == 0 && i == 0)))
          ptx::mbarrier_arrive(shared.wanted);
        --steps_left;
        const int64_t step = Workspace::step(attention, item.first_unit, query, head);
        shared.ring.acquire(slot);
        const int stage = slot.advance();
        shared.steps[stage] = {Workspace::grad_q(attention, step, 0), query,
                               order.flags(item, member, i + 1)};
        uint64_t& full = shared.ring.full[stage];
        ptx::mbarrier_arrive_expect_tx(
            full, 2 * sizeof(shared.sQ[0].data) + sizeof(shared.sStatistics[0]));
        const int64_t row = static_cast<int64_t>(item.query_begin) + query;
        copy_expected_tile(shared.sQ[stage], params.q, row, head, full);
        copy_expected_tile(shared.sGradOut[stage], params.grad_out, row, head, full);
        ptx::cp_async_bulk(shared.sStatistics[stage], Workspace::statistics(attention, step),
                           sizeof(shared.sStatistics[0]), full);
        if (member == 0 && i == 0) {
          ptx::mbarrier_wait(shared.keys_empty, keys_parity);
          copy_tile(shared.sK, params.k, item.key_begin, item.kv_head, shared.keys_full);
          ptx::mbarrier_wait(shared.values_empty, keys_parity);
          copy_tile(shared.sV, params.v, item.key_begin, item.kv_head, shared.values_full);
          keys_parity ^= 1;
        }
      }
    }
  }
}

// Adds what a warpgroup computes of dQ to its sums, in the order of the tiles of keys; one thread.
// Of the last tile it brings the sums to shared memory instead, and the warpgroup writes dQ.
template <typename Config>
struct LongSender {
  using Storage = LongBackwardStorage<Config>;
  using Workspace = LongWorkspace<Config>;
  static constexpr int kBytes = Workspace::kPart * 4;

  const AttentionBackwardParams& attention;
  Storage& shared;
  const int warpgroup;
  float* const staged;
  int parity = 0;
  int* sent = nullptr;  // the ticket of sums that are on their way

  __device__ __forceinline__ LongSender(const AttentionBackwardParams& params, Storage& storage,
                                        int own_warpgroup)
      : attention(params),
        shared(storage),
        warpgroup(own_warpgroup),
        staged(storage.sGradQ[own_warpgroup * 4]) {}

  // The tile behind this one may add to what has been sent, once that has arrived.
  __device__ __forceinline__ void pass_turn() {
    if (sent == nullptr) return;
    ptx::cp_async_bulk_wait();
    ptx::fence_proxy_async();
    ptx::red_release_gpu_add(sent, 1);
    sent = nullptr;
  }
  __device__ __forceinline__ static void wait_for_turn(const int* ticket, int before) {
    while (ptx::ld_acquire_gpu(ticket) < before) {
    }
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ void run() {
    const int group = attention.heads / attention.kv_heads;
    RingPosition<Storage::kItems> place;
    for (;;) {
      shared.items.wait(place);
      const KeyItem item = shared.item[place.stage];
      if (item.is_end) break;
      const StepOrder<Config> order(attention, item);
      const WindowOf<int> window = sequence_window(attention, item.num_keys - item.num_queries);
      for (int member = 0; member < group; ++member) {
        const int head = item.kv_head * group + member;
        for (int i = 0; i < order.count(); ++i) {
          const int query = order.query(i), tile = item.key / Config::kTileN;
          const TileRange<Config::kTileN, Config::kStep> tiles(window, query, item.num_keys);
          // How many tiles add to this step before this one.
          const int before = keys_fall(attention) ? tiles.last - 1 - tile : tile - tiles.first;
          const bool is_last = before == tiles.last - tiles.first - 1;
          const int64_t step = Workspace::step(attention, item.first_unit, query, head);
          float* sums = Workspace::grad_q(attention, step, warpgroup);
          int* ticket = Workspace::ticket(attention, step, warpgroup);
          shared.complete[warpgroup] = {item.query_begin + query,
                                        is_last ? min(item.num_queries - query, Config::kStep) : 0,
                                        head, before > 0};
          // There is room: what was sent before has been read.
          if (!is_last) ptx::mbarrier_arrive(shared.sums_ready[warpgroup]);
          pass_turn();  // of the step before
          if (before > 0) wait_for_turn(ticket, before);
          if (is_last && before > 0) {
            ptx::mbarrier_arrive_expect_tx(shared.sums_ready[warpgroup], kBytes);
            ptx::cp_async_bulk(staged, sums, kBytes, shared.sums_ready[warpgroup]);
          } else if (is_last) {
            ptx::mbarrier_arrive(shared.sums_ready[warpgroup]);
          }
          ptx::mbarrier_wait(shared.sums_full[warpgroup], parity);
          parity ^= 1;
          if (is_last) continue;
          // The first tile stores in place of adding.
          if (before > 0) {
            ptx::cp_reduce_async_bulk_add(sums, staged, kBytes);
          } else {
            ptx::cp_async_bulk_store(sums, staged, kBytes);
          }
          ptx::cp_async_bulk_commit();
          sent = ticket;
          ptx::cp_async_bulk_wait_read();
        }
      }
      pass_turn();
      shared.items.release(place.advance());
    }
  }
};

}  // namespace jagged_cuda::attention
