// A computing warpgroup of the forward kernel for long sequences (long_forward_consumer.cuh) with ranges of keys:
// the same steps in less code. What a CTA of short items walks over from one to the next, the code of all of
// its warps together, is more than the instruction cache holds, so that each copy of a step's code counts.
//
// All steps of an item, the first one, too, are one body: the scores of a step beside the product with V of the
// step before it, which before a first step is that of the item before (pending). Where none is pending, P and O
// hold what nobody wants, and so the product is that with any tile; O is cleared behind it.
#pragma once

#include "cuda/kernels/attention/long_forward_consumer.cuh"

namespace jagged_cuda::attention {

template <typename Config>
struct RangedForwardConsumer : LongForwardConsumer<Config> {
  using Base = LongForwardConsumer<Config>;
  using Element = typename Base::Element;
  using Mask = typename Base::Mask;
  using Base::attention, Base::shared, Base::warpgroup, Base::lane, Base::first_row, Base::place,
      Base::slot, Base::bias_step, Base::score, Base::s, Base::o, Base::p;
  using Base::Base;
  static_assert(Mask::kPrepared && Base::kEndsEarly && !Config::kOwnQueries &&
                !Config::kKeepsReference && !Base::Storage::kStoresThroughQueries);

  __device__ __forceinline__ void run() {
    if (warpgroup == Config::kWarpgroups - 1) this->pass_turn();  // the first is warpgroup 0's
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const WorkItem& item = shared.item[stage];
      const Mask mask(attention, item.tile, shared.keys[stage]);
      const bool is_end = item.is_end, has_keys = !is_end && mask.first() < mask.last();
      if (!has_keys || warpgroup * 64 >= item.tile.rows) {
        this->take_turn();
        this->pass_turn();
        if (is_end) return;
        this->pass_over_item(stage, mask, has_keys);
        continue;
      }
      this->wait_for_queries(stage);
      int score_slot = this->wait_for_slot(), value_slot = -1;
      int key = mask.first(), next;
      this->begin_scores();
      this->take_turn();
      this->start_scores(stage, score_slot);
      this->pass_turn();
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(s[0]);
      this->reset();
      for (;;) {
        const bool is_uncut = mask.is_uncut(first_row / 16, key);
        next = mask.next(key);
        ptx::wgmma_wait_group<1>();
        const bool is_last = next >= mask.own_last(warpgroup);
        this->release_operands(score_slot, is_last);
        this->finish_scores(mask, is_uncut, key);
        bool is_ready, moved;
        this->begin_next_scores(!is_last, [&] {
          moved = score.update(s, p, [&] {
            ptx::wgmma_wait_group<0>();
            ptx::fence_operands(o[0]);
            if (value_slot >= 0) this->release_slot(value_slot);
            is_ready = shared.ring.test(slot);
          });
        });
        if (moved) rescale_rows(o, score.rescale);
        if (is_last) break;
        key = next;
        if (!is_ready) shared.ring.wait(slot);
        score_slot = slot.advance();
        if constexpr (!Base::kLoadsAhead) this->begin_scores();
        this->take_turn();
        this->start_scores(stage, score_slot);
        value_slot = this->wait_for_slot();
        this->start_output(value_slot);
        this->pass_turn();
      }
      // Steps behind, which its rows do not see, are the other warpgroups'.
      if (next < mask.last()) this->skip_scores();
      value_slot = this->wait_for_slot();
      zero_values(value_slot, item.tile.num_keys - key);
      this->start_output(value_slot);
      float factor[2];
      finish_sums(stage, factor);
      this->finish_output(value_slot);
      for (; next < mask.last(); next = key) {
        key = mask.next(next);
        if (key < mask.last()) this->skip_scores();
        this->release_slot(this->wait_for_slot());
      }
      store_output(stage, factor);
      this->release_item(stage);
    }
  }

 private:
  // LSE, and what O is to be multiplied by.
  __device__ __forceinline__ void finish_sums(int stage, float (&factor)[2]) {
    const WorkItem& item = shared.item[stage];
    score.finish(factor, attention, item.tile.global_row + first_row, item.tile.rows - first_row,
                 item.head, item.tile.num_keys, lane, 0);
  }
  __device__ __forceinline__ void store_output(int stage, const float (&factor)[2]) {
    const WorkItem& item = shared.item[stage];
    store_quads(o, factor,
                row_of<Element>(attention.out, item.tile.global_row + first_row, item.head),
                attention.out.row_stride, item.tile.rows - first_row, attention.dim_v, lane);
  }
  // As the base's, in less code.
  __device__ __forceinline__ void zero_values(int stage, int rows) {
    constexpr int kChunks = Base::Storage::KeyRows::kChunks;
    if (rows >= Config::kTileN) return;
#pragma unroll 1
    for (int index = threadIdx.x % 128; index < (Config::kTileN - rows) * kChunks; index += 128) {
      *reinterpret_cast<uint4*>(shared.slots[stage].chunk(
          rows + index / kChunks, index % kChunks)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(Base::kZeroedBarrier + warpgroup, 128);
  }
};

}  // namespace jagged_cuda::attention
