// A computing warpgroup of the forward kernel for long sequences (long_forward.cuh: the mathematics, and the
// barriers between it and the others).
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_forward_config.cuh"
#include "cuda/kernels/attention/store_tile.cuh"

namespace jagged_cuda::attention {

// Computes 64 rows of each item: the third column of long_forward.cuh, in run(). A verb is what the four
// warps do together, each for 16 rows.
template <typename Config>
struct LongForwardConsumer {
  using Element = typename Config::Element;
  using Storage = LongForwardStorage<Config>;
  using Mask = typename Config::Mask;
  using Score = typename Config::Score;
  static constexpr int kTileN = Config::kTileN, kScoreBlocks = kTileN / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kTurnBarrier = 1, kZeroedBarrier = kTurnBarrier + Config::kWarpgroups,
                       kVoteBarrier = kZeroedBarrier + Config::kWarpgroups;
  static constexpr int kTurnThreads = 256;  // of two warpgroups
  // Whether a warpgroup leaves out the steps at the end of an item that its rows do not see.
  static constexpr bool kEndsEarly = Config::kOwnQueries;
  static constexpr bool kBiased = Config::Bias::kWarps > 0;
  // Whether the first step takes the maximum of some keys, and begins while the last product of the item
  // before still runs. With 160 registers it would spill.
  static constexpr bool kGuesses =
      Config::kKeepsReference && Config::kDim >= 96 && !Config::kOwnQueries;
  static_assert(!(Storage::kStoresThroughQueries && kEndsEarly));  // else warps may read Q still

  const AttentionParams& attention;
  const CUtensorMap& out;
  Storage& shared;
  const int warpgroup, lane, first_row;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kSlots> slot;
  unsigned q_parities = 0;  // one bit per tile of Q
  int query_stage = 0;      // of kQueryRing
  RingPosition<Config::Bias::kSteps> bias_step;
  Score score;
  Accumulator<1, kScoreBlocks> s;
  Accumulator<1, kOutBlocks> o;
  PackedRows<Element, kScoreBlocks> p;

  __device__ __forceinline__ LongForwardConsumer(const LongForwardParams& params, Storage& storage,
                                                 int own_warpgroup)
      : attention(params.attention),
        out(params.out),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(threadIdx.x % 32),
        first_row(own_warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4),
        score(params.attention) {}

  __device__ __forceinline__ void run() {
    bool pending = false;                     // the last product of the item before is missing
    int pending_stage = 0, pending_rows = 0;  // of that item; of its last tile of V
    if (warpgroup == Config::kWarpgroups - 1) pass_turn();  // the first is warpgroup 0's
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const WorkItem& item = shared.item[stage];
      const QueryTile tile = item.tile;
      const Mask mask(attention, item.tile, shared.keys[stage], warpgroup * 64);
      const bool is_end = item.is_end, has_keys = !is_end && mask.first() < mask.last();
      int value_slot = 0;
      if (pending) {
        value_slot = wait_for_slot();
        zero_values(value_slot, pending_rows);
      }
      if (!has_keys || warpgroup * 64 >= tile.rows) {
        if (pending) {
          finish_item_before(pending_stage, value_slot);
          pending = false;
        } else {
          take_turn();
          pass_turn();
        }
        if (is_end) return;
        pass_over_item(stage, mask, has_keys);
        continue;
      }

      wait_for_queries(stage);
      int score_slot = wait_for_slot();
      // Behind the last step that this warpgroup computes.
      const int last = kEndsEarly ? mask.own_last(warpgroup) : mask.last();
      int key = mask.first(), next = mask.next(key);
      if constexpr (kGuesses) {
        const auto finish_first_step = [&](auto finish_before) {
          finish_guessed_step(stage, tile.rows, mask, key, next, last, score_slot, finish_before);
        };
        take_turn();
        if (pending) {
          start_scores(stage, score_slot);
          start_output(value_slot);
          pass_turn();
          ptx::wgmma_wait_group<1>();
          Score before = score;
          finish_first_step([&] {
            finish_output(value_slot);
            store_item(pending_stage, before);
          });
          release_item(pending_stage);
        } else {
          start_scores(stage, score_slot);
          pass_turn();
          ptx::wgmma_wait_group<0>();
          finish_first_step([] {});
        }
        clear_output();
      } else {
        first_step(stage, tile.rows, mask, key, next, last, score_slot, pending, pending_stage,
                   value_slot);
      }

      bool is_ready = shared.ring.test(slot);
      while (next < last) {
        key = next;
        if (!is_ready) shared.ring.wait(slot);
        score_slot = slot.advance();
        take_turn();
        start_scores(stage, score_slot);
        value_slot = wait_for_slot();
        start_output(value_slot);
        pass_turn();
        const bool is_uncut = mask.is_uncut(row_of_thread() / 16, key);
        next = mask.next(key);
        ptx::wgmma_wait_group<1>();
        finish_step(stage, mask, is_uncut, key, next >= last, score_slot, [&] {
          finish_output(value_slot);
          is_ready = shared.ring.test(slot);
        });
      }

      pending_rows = item.tile.num_keys - key;
      if (Config::kOwnQueries || (kEndsEarly && next < mask.last())) {
        // Its own Q of the next item is not there yet, or it has done its steps before the others: its
        // last product does not wait for the next item.
        if (next < mask.last()) skip_scores();
        value_slot = wait_for_slot();
        zero_values(value_slot, pending_rows);
        start_output(value_slot);
        finish_output(value_slot);
        for (; next < mask.last(); next = key) {
          key = mask.next(next);
          if (key < mask.last()) skip_scores();
          release_slot(wait_for_slot());
        }
        store_item(stage, score);
        release_item(stage);
        pending = false;
      } else {
        pending = true;
        pending_stage = stage;
      }
    }
  }

  // ---- Items -----------------------------------------------------------------------------------

  // The last product of the item before and its output, where no scores start beside it.
  __device__ __forceinline__ void finish_item_before(int item_stage, int value_slot) {
    take_turn();
    start_output(value_slot);
    pass_turn();
    finish_output(value_slot);
    store_item(item_stage, score);
    release_item(item_stage);
  }
  // An item without keys, of which the output is 0, or without rows for this warpgroup.
  __device__ __forceinline__ void pass_over_item(int item_stage, const Mask& mask, bool has_keys) {
    if (has_keys) {
      skip_steps(item_stage, mask);
    } else {
      reset();
      store_item(item_stage, score);
    }
    release_item(item_stage);
  }

  // ---- Steps -----------------------------------------------------------------------------------

  // The first step of an item, whose maximum becomes the reference, beside the last product of the item
  // before if that is pending.
  __device__ __forceinline__ void first_step(int item_stage, int rows, const Mask& mask, int key,
                                             int next, int last, int score_slot, bool pending,
                                             int pending_stage, int value_slot) {
    if (pending) {
      take_turn();
      start_scores(item_stage, score_slot);
      start_output(value_slot);
      pass_turn();
      finish_output(value_slot);
      ptx::fence_operands(s[0]);
      store_item(pending_stage, score);
      if constexpr (!Storage::kStoresThroughQueries) release_item(pending_stage);
    } else {
      take_turn();
      start_scores(item_stage, score_slot);
      pass_turn();
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(s[0]);
    }
    release_operands(score_slot, next >= last);
    reset();
    finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
    score.update(s, p, [] {});
    if constexpr (Config::kKeepsReference) score.hold_rows(row_of_thread(), rows);
    if constexpr (Storage::kStoresThroughQueries) {
      if (pending) release_item(pending_stage);  // its copies ran beside this step
    }
  }
  // The same relative to a guess, so that its exponentials run beside that product, too.
  template <typename FinishBefore>
  __device__ __forceinline__ void finish_guessed_step(int item_stage, int rows, const Mask& mask,
                                                      int key, int next, int last, int score_slot,
                                                      FinishBefore finish_before) {
    ptx::fence_operands(s[0]);
    score.reset();
    finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
    if (any_lane(score.try_guessing(s, p, mask.cuts(key), row_of_thread(), rows, finish_before))) {
      compute_once_more(item_stage, score_slot);
      finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
      score.move(s, p);
    } else {
      score.keep();
    }
    release_operands(score_slot, next >= last);
  }
  // P of a step behind the first, written after finish_last(), by which O is up to date.
  template <typename FinishLast>
  __device__ __forceinline__ void finish_step(int item_stage, const Mask& mask, bool is_uncut,
                                              int key, bool is_last, int score_slot,
                                              FinishLast finish_last) {
    if constexpr (Config::kKeepsReference) {
      finish_scores(mask, is_uncut, key);
      if (any_lane(score.try_keeping(s, p, finish_last))) {
        compute_once_more(item_stage, score_slot);
        finish_scores(mask, is_uncut, key);
        score.move(s, p);
        rescale_rows(o, score.rescale);
      } else {
        score.keep();
      }
      release_operands(score_slot, is_last);
    } else {
      release_operands(score_slot, is_last);
      finish_scores(mask, is_uncut, key);
      const bool moved = score.update(s, p, finish_last);
      if (moved) rescale_rows(o, score.rescale);
    }
  }
  // Behind S of a step: K, and behind the last one Q.
  __device__ __forceinline__ void release_operands(int score_slot, bool is_last) {
    release_slot(score_slot);
    if (is_last) release_queries();
  }

  // ---- Barriers --------------------------------------------------------------------------------

  __device__ __forceinline__ void take_turn() const {
    ptx::bar_sync(kTurnBarrier + warpgroup, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1;
    ptx::bar_arrive(kTurnBarrier + next, kTurnThreads);
  }
  // Whether `value` holds in some lane of the warpgroup.
  __device__ __forceinline__ bool any_lane(bool value) const {
    return ptx::bar_red_or(kVoteBarrier + warpgroup, 128, value);
  }
  __device__ __forceinline__ int wait_for_slot() {
    shared.ring.wait(slot);
    return slot.advance();
  }
  __device__ __forceinline__ void release_slot(int stage) {
    if (lane == 0) shared.ring.release(stage);
  }
  // Every lane arrives for what it has read, as racecheck follows it. As two statements: with one, ptxas
  // spills in the loop over keys.
  __device__ __forceinline__ void release_item(int stage) {
    if constexpr (Storage::kStoresThroughQueries) ptx::cp_async_bulk_wait_read();
    if (lane == 0) shared.items.release(stage);
    if (lane != 0) shared.items.release(stage);
  }
  __device__ __forceinline__ int query_tile(int item_stage) const {
    return Config::kOwnQueries ? warpgroup : Storage::kQueryRing ? query_stage : item_stage;
  }
  __device__ __forceinline__ void wait_for_queries(int item_stage) {
    const int tile = query_tile(item_stage);
    ptx::mbarrier_wait(shared.q_full[tile], q_parities >> tile & 1);
    q_parities ^= 1u << tile;
  }
  // Behind the last S of an item.
  __device__ __forceinline__ void release_queries() {
    if (Config::kOwnQueries && lane == 0) ptx::mbarrier_arrive(shared.q_empty[warpgroup]);
    if (Storage::kQueryRing) {
      if (lane == 0) ptx::mbarrier_arrive(shared.q_empty[query_stage]);
      query_stage ^= 1;
    }
  }

  // ---- Scores ----------------------------------------------------------------------------------

  // The first of this lane's two rows. Where registers are full it is found anew.
  __device__ __forceinline__ int row_of_thread() const {
    if constexpr (!Config::kKeepsReference) return first_row;
    const int thread = ptx::tid_x();
    return warpgroup * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
  }
  // S = Q K^T
  __device__ __forceinline__ void start_scores(int item_stage, int stage) {
    const auto& sOwn = shared.sQ[query_tile(item_stage)];
    const int row = Config::kOwnQueries ? 0 : warpgroup * 64;
    ptx::wgmma_fence();
    wgmma_rows_by_rows<Config::kDim, true>(s, sOwn, row, shared.slots[stage]);
    ptx::wgmma_commit_group();
  }
  // S once more, from K, which is still there: some reference has fallen behind.
  __device__ __forceinline__ void compute_once_more(int item_stage, int stage) {
    start_scores(item_stage, stage);
    ptx::wgmma_wait_group<0>();
  }
  // Masks of S, when its product is done.
  __device__ __forceinline__ void finish_scores(const Mask& mask, bool is_uncut, int key) {
    ptx::fence_operands(s[0]);
    score.begin(s);
    mask.hide(s, Score::kHidden, is_uncut, key, warpgroup, [&] { return row_of_thread(); }, lane);
  }
  // Instead of a product with keys that this warpgroup does not see.
  __device__ __forceinline__ void skip_scores() {
    release_slot(wait_for_slot());
    if constexpr (kBiased) shared.bias.skip(bias_step);
    take_turn();
    pass_turn();
  }
  // The other warpgroups' work on an item, after its first turn.
  __device__ __forceinline__ void skip_steps(int item_stage, const Mask& mask) {
    if constexpr (!Config::kOwnQueries) wait_for_queries(item_stage);
    if constexpr (Storage::kQueryRing) release_queries();
    for (int key = mask.first(); key < mask.last(); key = mask.next(key)) {
      if (key != mask.first()) {
        take_turn();
        pass_turn();
      }
      for (int i = 0; i < 2; ++i) release_slot(wait_for_slot());
      if constexpr (kBiased) shared.bias.skip(bias_step);
    }
  }

  // ---- Output ----------------------------------------------------------------------------------

  // O += P V
  __device__ __forceinline__ void start_output(int stage) {
    ptx::fence_operands(o[0]);
    ptx::wgmma_fence();
    if constexpr (Config::Values::kWarps > 0) {
      wgmma_packed_by_rows(o, p, Config::Values::prepared(shared.slots[stage]));
    } else {
      wgmma_packed_by_columns<true>(o, p, shared.slots[stage]);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void finish_output(int stage) {
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(o[0]);
    release_slot(stage);
  }
  // Rows of V from `rows` on become zeros. All warpgroups write the same.
  __device__ __forceinline__ void zero_values(int stage, int rows) {
    if constexpr (Config::Values::kWarps == 0) {
      if (rows >= kTileN) return;
      zero_tile_rows<128>(shared.slots[stage], rows, kTileN, threadIdx.x % 128);
      ptx::fence_proxy_async();
      ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int e = 0; e < kOutBlocks * 4; ++e) o[0][e / 4][e % 4] = 0.0f;
  }
  __device__ __forceinline__ void reset() {
    score.reset();
    clear_output();
  }
  // Output and LSE. All warps of the warpgroup have computed their last S of the item.
  __device__ __forceinline__ void store_item(int stage, Score& score) {
    const WorkItem& item = shared.item[stage];
    const int own_row = row_of_thread();
    const int rows = item.tile.rows - own_row;  // from this lane's first on
    const int shift = Config::kPacked ? attention.packed_shift : 0;
    const int64_t global_row = item.tile.global_row + (own_row >> shift);
    const int head = item.head + (own_row & ((1 << shift) - 1));
    float factor[2];
    score.finish(factor, attention, global_row, rows, head, item.tile.num_keys, lane, shift);
    if constexpr (Storage::kStoresThroughQueries) {
      store_through_queries(stage, item, own_row, shift, factor);
    } else if constexpr (sizeof(Element) == 4) {
      store_pairs(o, factor, row_of<Element>(attention.out, global_row, item.head),
                  attention.out.row_stride, rows, attention.dim_v, lane);
    } else {
      store_quads(o, factor, row_of<Element>(attention.out, global_row, item.head),
                  attention.out.row_stride, rows, attention.dim_v, lane);
    }
  }
  // O by way of the item's tile of Q: 16 rows of a warp as one bulk copy, fewer by its lanes.
  __device__ __forceinline__ void store_through_queries(int stage, const WorkItem& item,
                                                        int own_row, int shift,
                                                        const float (&factor)[2]) {
    auto& tile = shared.sQ[stage];
    const int warp_row = own_row - lane / 4, warp_rows = item.tile.rows - warp_row;
    const int64_t first_row = item.tile.global_row + (warp_row >> shift);
    write_rows(tile, warp_row, o, factor, lane);
    if (warp_rows >= kStoredRows) {
      send_rows(out, tile, warp_row, static_cast<int>(first_row), item.head, lane);
    } else {
      const auto offset_of = [&](int row) {
        const int64_t in_row =
            Config::kPacked ? (row & ((1 << shift) - 1)) * attention.out.head_stride : 0;
        return (row >> shift) * attention.out.row_stride + in_row;
      };
      copy_rows(row_of<Element>(attention.out, first_row, item.head), offset_of, tile, warp_row,
                warp_rows, attention.dim_v, lane);
    }
  }
};

}  // namespace jagged_cuda::attention
