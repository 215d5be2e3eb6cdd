// What a CTA of a persistent kernel for long sequences works on, where its rows are queries
// (long_forward.cuh, wide_dq.cuh): items, each a tile of kTileM queries of one sequence
// and a head, or of kTileM >> packed_shift queries and 2^packed_shift heads.
//
// A warp of producers, the scheduler, takes items from the plan (long_plan.cuh) and publishes them in a
// ring, which all other warps of the CTA follow. The last one says that there are no more. Where it takes
// a while to find what an item's rows see (Config::Mask::kPrepared), items pass through a ring before
// that, `planned`, and a second warp finds it on their way.
//
// Barriers:           arrives                       waits
//     planned.full    scheduler                     prepare_masks
//     planned.empty   prepare_masks                 scheduler
//     items.full      scheduler, or every lane      all others
//                     of prepare_masks
//     items.empty     all others                    scheduler, or prepare_masks
#pragma once

#include "cuda/kernels/attention/bias.cuh"
#include "cuda/kernels/attention/long_plan.cuh"
#include "cuda/kernels/attention/tiles.cuh"

namespace jagged_cuda::attention {

struct WorkItem {
  QueryTile tile;
  int head;
  bool is_end;  // there are no more
};

// Takes items of kTileM queries from the plan, one ahead; one warp. Where late queries see more keys
// (`descending`), they come first, those of all heads. If kGeneral, only the used keys count
// (AttentionParams::kv_lengths). Calls wait(number of items published) before it takes the next, and
// find(stage, item) before it publishes one.
template <int kTileM, bool kGeneral, int kItems, typename Wait, typename Find>
__device__ __forceinline__ void schedule_items(const AttentionParams& attention, Ring<kItems>& ring,
                                               WorkItem (&published)[kItems], bool descending,
                                               Wait wait, Find find) {
  RingPosition<kItems> place;
  int count = 0;
  const auto publish = [&](const WorkItem& item) {
    ring.acquire(place);
    if (threadIdx.x % 32 == 0) {
      published[place.stage] = item;
      find(place.stage, item);
      ptx::mbarrier_arrive(ring.full[place.stage]);
    }
    __syncwarp();
    place.advance();
    ++count;
  };
  const int shift = attention.packed_shift, heads = attention.heads >> shift;
  auto items = PlannedItems::of<kTileM, false>(attention, heads);
  PlannedSequence sequence;
  int64_t index;
  while (wait(count), items.next(sequence, index)) {
    const int rows = sequence.num_queries << shift, tiles = (rows + kTileM - 1) / kTileM;
    // Wrong offsets make a plan whose numbers overflow.
    if (index < 0 || index >= static_cast<int64_t>(tiles) * heads) continue;
    RowRange kv = planned_keys(attention, sequence);
    if (kGeneral && sequence.seq >= 0) kv.len = used_keys(attention, sequence.seq, kv.len);
    WorkItem item = {};
    // No memory holds the result of a sequence of 2^32 items; a division of 64 bits is long code.
    const unsigned fastest = descending ? heads : tiles, index32 = static_cast<unsigned>(index);
    const int slow = static_cast<int>(index32 / fastest),
              fast = static_cast<int>(index32 % fastest);
    // With ranges the first may see most of all.
    const int later = kGeneral ? (slow == 0 ? 0 : tiles - slow) : tiles - 1 - slow;
    item.tile.row = (descending ? later : fast) * kTileM;
    item.tile.rows = min(kTileM, rows - item.tile.row);
    item.tile.num_queries = sequence.num_queries;
    item.tile.num_keys = static_cast<int>(kv.len);
    item.tile.global_row = sequence.begin + (item.tile.row >> shift);
    item.tile.key_begin = kv.begin;
    item.head = (descending ? fast : slow) << shift;
    publish(item);
  }
  WorkItem end = {};
  end.is_end = true;
  publish(end);
  ptx::griddepcontrol_wait();  // launch_dependent
}

// The scheduler where items need no preparation, or find(stage, item) is enough.
template <typename Config, typename Storage, typename Find>
__device__ __forceinline__ void schedule(const AttentionParams& attention, Storage& shared,
                                         Find find) {
  schedule_items<Config::kTileM, false>(
      attention, shared.items, shared.item, attention.window_right < AttentionParams::kUnbounded,
      [](int) {}, find);
}
template <typename Config, typename Storage>
__device__ __forceinline__ void schedule(const AttentionParams& attention, Storage& shared) {
  schedule<Config>(attention, shared, [](int, const WorkItem&) {});
}

// The scheduler where masks are to be prepared. Many items ahead hide how long it takes to find short
// ones; of long ones a CTA takes but one ahead, so that all CTAs end together.
template <typename Config, typename Storage>
__device__ __forceinline__ void schedule_planned(const AttentionParams& attention,
                                                 Storage& shared) {
  constexpr int kItems = Storage::kItems, kLongSteps = 6;
  const auto wait = [&](int count) {
    if (count < 2) return;
    const int known = count - 2, stage = known % kItems;
    ptx::mbarrier_wait(shared.items.full[stage], known / kItems & 1);
    const int last_done =
        count - (shared.keys[stage].steps.keys() >= kLongSteps * Config::kTileN ? 2 : kItems);
    if (last_done >= 0)
      ptx::mbarrier_wait(shared.items.empty[last_done % kItems], last_done / kItems & 1);
  };
  schedule_items<Config::kTileM, true>(attention, shared.planned, shared.planned_item, true, wait,
                                       [](int, const WorkItem&) {});
}

// Finds what the rows of the items see, behind the scheduler; one warp.
template <typename Config, typename Storage>
__device__ __forceinline__ void prepare_masks(const AttentionParams& attention, Storage& shared) {
  RingPosition<Storage::kItems> from, to;
  for (;;) {
    shared.planned.wait(from);
    const WorkItem item = shared.planned_item[from.stage];
    shared.planned.release(from.advance());
    shared.items.acquire(to);
    if (!item.is_end) Config::Mask::prepare(shared.keys[to.stage], attention, item.tile);
    if (threadIdx.x % 32 == 0) shared.item[to.stage] = item;
    shared.items.publish(to.stage);  // every lane, for what it has written
    to.advance();
    if (item.is_end) return;
  }
}

}  // namespace jagged_cuda::attention
