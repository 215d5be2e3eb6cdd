// A computing warpgroup of the forward kernel for long sequences with ranges of keys, biases, silu
// (ranged_forward.cuh): what long_forward_consumer.cuh does, in less code. What a CTA runs through from one short
// item to the next, the code of all its warps together, is more than the first instruction cache holds; each
// copy of a product, of a step's exponentials or of the output costs what it takes to fetch it. So
//     every step of an item, the first one, too, is the same code behind the start of its products,
//     the last product and the output of an item come before the next item, not beside its first product.
#pragma once

#include "cuda/kernels/attention/long_forward_consumer.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

// s += a b^T, as wgmma_rows_by_rows.
template <int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void add_rows_by_rows(Accumulator<1, kBlocks>& s, const ATile& a,
                                                 int a_row, const BTile& b) {
  using Product = ptx::Wgmma<typename ATile::Element, false>;
  const ptx::MatrixDescriptor a_rows = descriptor_of<true>(a, a_row),
                              b_rows = descriptor_of<true>(b);
#pragma unroll
  for (int k = 0; k < ATile::kColumns; k += 16) {
    Product::run(s[0], a_rows + ATile::column_step_bytes(k), b_rows + BTile::column_step_bytes(k),
                 true);
  }
}

template <typename Config>
struct RangedForwardConsumer : LongForwardConsumer<Config> {
  using Base = LongForwardConsumer<Config>;
  using Element = typename Base::Element;
  using Mask = typename Base::Mask;
  using Score = typename Base::Score;
  using Base::attention, Base::shared, Base::warpgroup, Base::lane, Base::first_row, Base::place,
      Base::slot, Base::bias_step, Base::score, Base::s, Base::o, Base::p, Base::zero_values;
  using Base::Base;
  static constexpr bool kBiased = Base::kBiased, kLoadsAhead = Config::Bias::kAhead;
  static_assert(Mask::kPrepared && Base::Storage::kQueryRing && !Config::kKeepsReference);

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
      begin_scores();
      this->take_turn();
      start_scores(stage, score_slot);
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
        finish_scores(mask, is_uncut, key);
        bool is_ready, moved;
        begin_next_scores(!is_last, [&] {
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
        if constexpr (!kLoadsAhead) begin_scores();
        this->take_turn();
        start_scores(stage, score_slot);
        value_slot = this->wait_for_slot();
        this->start_output(value_slot);
        this->pass_turn();
      }

      // Steps from `next` on are other warpgroups' alone.
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
  // What is added to the scores of the next step, whose keys are there, divided by their scale: their
  // product starts from it.
  __device__ __forceinline__ void begin_scores() {
    if constexpr (kBiased) {
      shared.bias.wait(bias_step, first_row);
      load_bias();
      if constexpr (std::is_base_of_v<SoftmaxScore, Score> && !kLoadsAhead)
        score.is_large = shared.bias.is_large[bias_step.stage];
      pass_bias();
    }
  }
  __device__ __forceinline__ void load_bias() {
    shared.bias.load(s, attention, bias_step, first_row, lane);
  }
  __device__ __forceinline__ void pass_bias() { shared.bias.pass(bias_step, first_row, lane); }
  // The same for the step behind this one, if there is one, when this one's scores have been used.
  template <typename UseScores>
  __device__ __forceinline__ void begin_next_scores(bool exists, UseScores use_scores) {
    if constexpr (kLoadsAhead) {
      if (exists) shared.bias.wait(bias_step, first_row);
      use_scores();
      if (exists) {
        load_bias();
        pass_bias();
      }
    } else {
      use_scores();
    }
  }
  // S = Q K^T, or what begin_scores() left plus that.
  __device__ __forceinline__ void start_scores(int item_stage, int stage) {
    if constexpr (kBiased) {
      ptx::fence_operands(s[0]);
      ptx::wgmma_fence();
      add_rows_by_rows(s, shared.sQ[this->query_tile(item_stage)], warpgroup * 64,
                       shared.slots[stage]);
      ptx::wgmma_commit_group();
    } else {
      Base::start_scores(item_stage, stage);
    }
  }
  // Masks of S, when its product is done, and what else is rare. One jump over all of it, for which
  // ptxas finds no place outside of the loop.
  __device__ __forceinline__ void finish_scores(const Mask& mask, bool is_uncut, int key) {
    ptx::fence_operands(s[0]);
    score.begin_step();
    if (is_uncut && !score.changes()) return;  // as a rule
    score.begin(s);
    mask.hide(s, Score::kHidden, is_uncut, key, warpgroup, [&] { return first_row; }, lane);
    score.center(s);
  }
  // The two parts of store_item(): LSE, and what O is to be multiplied by; and O.
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
};

}  // namespace jagged_cuda::attention
