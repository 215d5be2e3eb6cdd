// A computing warpgroup of the backward kernel for long sequences (long_backward.cuh), which has
// its pseudocode and the table of barriers. run_steps() is that pseudocode; before it come its
// verbs, in the order of a step.
#pragma once

#include "cuda/kernels/attention/long_backward_steps.cuh"

namespace jagged_cuda::attention {

// A warpgroup that computes 64 keys of each item.
template <typename Config>
struct LongBackwardConsumer {
  using Element = typename Config::Element;
  using Storage = LongBackwardStorage<Config>;
  static constexpr int kStep = Config::kStep, kScoreBlocks = kStep / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kZeroedBarrier = 1;
  using Packed = PackedRows<Element, kScoreBlocks>;

  // lse or delta of the queries that are this lane's columns.
  struct Columns {
    float4 chunks[kScoreBlocks / 2];  // two pairs of queries each

    __device__ __forceinline__ float at(int block, int i) const {
      const float4& chunk = chunks[block / 2];
      if (block % 2 == 0) return i % 2 == 0 ? chunk.x : chunk.y;
      return i % 2 == 0 ? chunk.z : chunk.w;
    }
  };
  // A step whose dQ is still to be computed and added.
  struct LateStep {
    float* grad_q;
    int rows;
    int score_stage;
    int score_parity;
  };

  const AttentionBackwardParams& attention;
  const CUtensorMap &grad_k, &grad_v;
  Storage& shared;
  const int warpgroup, lane, warp;
  const float scale_log2;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kStages> slot;
  RingPosition<Config::kScoreStages> scores;
  int keys_parity = 0, stage = 0;
  StepFlags flags = {0};
  LongStep step;
  int sums_parity = 0;
  bool is_staged = false;  // dQ is in shared memory, and not yet sent
  float* sums = nullptr;   // where it goes without an order; may be null
  Columns lse, delta;
  Accumulator<1, kOutBlocks> dk, dv;

  __device__ __forceinline__ LongBackwardConsumer(const LongBackwardOperands& params,
                                                  Storage& storage, int own_warpgroup)
      : attention(params.attention),
        grad_k(params.grad_k),
        grad_v(params.grad_v),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        scale_log2(static_cast<float>(params.attention.scale) * kLog2E) {}

  // --- operands

  // Rows [first, last) of a tile become zeros, behind finish_zeros().
  template <typename Tile>
  __device__ __forceinline__ void zero_rows(Tile& tile, int first, int last) {
    zero_tile_rows<128>(tile, first, last, threadIdx.x % 128);
  }
  __device__ __forceinline__ void finish_zeros() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
  }
  // Waits for K or V of an item; this warpgroup's rows past the end become zeros.
  __device__ __forceinline__ void wait_for_rows(uint64_t& full, typename Storage::KeyRows& tile,
                                                const KeyItem& item) {
    ptx::mbarrier_wait(full, keys_parity);
    const int first = max(item.keys, warpgroup * 64), last = warpgroup * 64 + 64;
    if (first < last) {
      zero_rows(tile, first, last);
      finish_zeros();
    }
  }
  // Waits for Q and dO of the next step; rows past the end become zeros.
  __device__ __forceinline__ void wait_for_step() {
    shared.ring.wait(slot);
    stage = slot.advance();
    const int rows = flags.rows();
    if (rows < kStep) {
      zero_rows(shared.sQ[stage], rows, kStep);
      zero_rows(shared.sGradOut[stage], rows, kStep);
      finish_zeros();
    }
  }
  // What decides how the step runs.
  __device__ __forceinline__ void read_step() {
    if constexpr (Config::kOrdered) {
      const int2 words = *reinterpret_cast<const int2*>(&shared.steps[stage].query);
      step.query = words.x;
      step.next = words.y;
    } else {
      const int4 words = *reinterpret_cast<const int4*>(&shared.steps[stage]);
      step.grad_q = reinterpret_cast<float*>(static_cast<uint64_t>(static_cast<uint32_t>(words.x)) |
                                             static_cast<uint64_t>(words.y) << 32);
      step.query = words.z;
      step.next = words.w;
    }
  }

  // --- scores: S^T and dP^T become P^T and dS^T

  __device__ __forceinline__ void load_chunk(Columns& columns, int statistic, int chunk) const {
    if (chunk >= kScoreBlocks / 2) return;
    columns.chunks[chunk] = *reinterpret_cast<const float4*>(
        &shared.sStatistics[stage][statistic][chunk * 16 + lane % 4 * 4]);
  }
  __device__ __forceinline__ void load_first_chunks(Columns& columns, int statistic) const {
#pragma unroll
    for (int chunk = 0; chunk < Config::kStatisticsAhead; ++chunk)
      load_chunk(columns, statistic, chunk);
  }
  // S^T = K Q^T, and what is needed behind it.
  __device__ __forceinline__ void start_scores(Accumulator<1, kScoreBlocks>& s) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows<0, true>(s, shared.sK, warpgroup * 64, shared.sQ[stage]);
    ptx::wgmma_commit_group();
    read_step();
    load_first_chunks(lse, 0);
  }
  // dP^T = V dO^T
  __device__ __forceinline__ void start_grad_probs(Accumulator<1, kScoreBlocks>& dp) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows<0, true>(dp, shared.sV, warpgroup * 64, shared.sGradOut[stage]);
    ptx::wgmma_commit_group();
  }
  // P^T = exp2(...)
  __device__ __forceinline__ void finish_scores(Accumulator<1, kScoreBlocks>& s,
                                                Accumulator<1, kScoreBlocks>& probs,
                                                const KeyItem& item) {
    ptx::fence_operands(s[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      if (block % 2 == 0) load_chunk(lse, 0, block / 2 + Config::kStatisticsAhead);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        probs[0][block][i] =
            ptx::ex2_approx(__fmaf_rn(s[0][block][i], scale_log2, -lse.at(block, i)));
      }
    }
    load_first_chunks(delta, 1);
    if (flags.cuts(warpgroup)) zero_unseen(probs, item, step.query);
  }
  // dS^T = P^T * (dP^T - delta), to s.
  __device__ __forceinline__ void finish_grad_probs(Accumulator<1, kScoreBlocks>& s,
                                                    Accumulator<1, kScoreBlocks>& dp) {
    ptx::fence_operands(dp[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      if (block % 2 == 0) load_chunk(delta, 1, block / 2 + Config::kStatisticsAhead);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][block][i] *= dp[0][block][i] - delta.at(block, i);
    }
  }
  // Zeros where a query does not see a key, and for keys past the end.
  __device__ __forceinline__ void zero_unseen(Accumulator<1, kScoreBlocks>& values,
                                              const KeyItem& item, int query) const {
    const WindowOf<int> window = queries_window(attention, item);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + warp * 16 + half * 8 + lane / 4;
      const VisibleColumns visible(window, item.key + row, query, kStep, query + kStep);
      const int last = row < item.keys ? visible.last : 0;
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = block * 8 + 2 * (lane % 4) + i;
          if (column < visible.first || column >= last) values[0][block][2 * half + i] = 0.0f;
        }
      }
    }
  }

  // --- dS^T in shared memory, and dQ, one step late

  // dS^T to shared memory, [keys, queries].
  __device__ __forceinline__ void write_grad_scores(const Packed& ds) {
    ptx::mbarrier_wait(shared.scores_empty[scores.stage], scores.parity ^ 1);
    auto& tile = shared.sGradScores[scores.stage];
    const int row = warpgroup * 64 + warp * 16 + lane % 16;
    const uint32_t base = ptx::shared_address(tile.data) + row * 128;
    const int swizzle = row & 7;
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      const int chunk = 2 * k + lane / 16;
      const uint32_t address = base + k / 4 * (Config::kTileN * 128) +
                               ((chunk % 8) ^ swizzle) * Storage::ScoreRows::kChunkBytes;
      ptx::stmatrix_x4(address, ds.fragments[k]);
    }
  }
  // The step's dS is written; its dQ is late from now on.
  __device__ __forceinline__ LateStep publish_grad_scores() {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.scores_full[scores.stage]);
    if constexpr (Config::kSendsLate) send_grad_q();
    const LateStep late = {step.grad_q, flags.rows(), scores.stage, scores.parity};
    scores.advance();
    return late;
  }

  // This warpgroup's part of a step's dQ: at 128 dims half of the columns, at 64 half of the
  // queries.
  static constexpr bool kSharesColumns = Config::kDim == 128;
  __device__ __forceinline__ int own_query() const {
    return (kSharesColumns ? 0 : warpgroup * 64) + warp * 16;
  }
  // dQ = dS K, that part.
  __device__ __forceinline__ void start_grad_q(Accumulator<1, 8>& dq, const LateStep& late) {
    const int own_columns = kSharesColumns ? warpgroup : 0,
              own_queries = kSharesColumns ? 0 : warpgroup;
    ptx::mbarrier_wait(shared.scores_full[late.score_stage], late.score_parity);
    const ptx::MatrixDescriptor grad_scores = shared.sGradScores[late.score_stage].descriptor() +
                                              own_queries * Storage::ScoreRows::kGroupBytes,
                                keys = shared.sK.descriptor() +
                                       own_columns * Storage::KeyRows::kGroupBytes;
    ptx::wgmma_fence();
    wgmma_columns_by_columns<typename Storage::ScoreRows, typename Storage::KeyRows>(
        dq, grad_scores, keys);
    ptx::wgmma_commit_group();
  }

  // dQ to shared memory, for send_grad_q(); or, if it is complete with what is there, to memory.
  __device__ __forceinline__ void stage_grad_q(Accumulator<1, 8>& dq, const LateStep& late) {
    ptx::fence_operands(dq[0]);
    if (lane == 0) ptx::mbarrier_arrive(shared.scores_empty[late.score_stage]);
    float* staged = shared.sGradQ[warpgroup * 4 + warp] + lane * 4;
    is_staged = true;
    if constexpr (Config::kOrdered) {
      if (completes_grad_q(dq, staged)) return;
    } else {
      if (lane == 0) ptx::cp_async_bulk_wait_read();
      __syncwarp();
      const int row = own_query();
      sums = row < late.rows ? late.grad_q + row / 16 * LongWorkspace<Config>::kChunk +
                                   (kSharesColumns ? warpgroup * LongWorkspace<Config>::kPart : 0)
                             : nullptr;
    }
#pragma unroll
    for (int block = 0; block < 8; ++block) ptx::st_shared_16(staged + block * 128, dq[0][block]);
  }
  // Waits until there is room for dQ; or, where it is complete with what is there, writes it.
  __device__ __forceinline__ bool completes_grad_q(Accumulator<1, 8>& dq, const float* staged) {
    ptx::mbarrier_wait(shared.sums_ready[warpgroup], sums_parity);
    sums_parity ^= 1;
    // The lane that reads is the one that arrives, as racecheck follows it.
    int4 words = {};
    if (lane == 0) words = *reinterpret_cast<const int4*>(&shared.complete[warpgroup]);
    if (__shfl_sync(0xffffffffu, words.y, 0) > 0) {
      complete_grad_q(dq, staged,
                      {__shfl_sync(0xffffffffu, words.x, 0), __shfl_sync(0xffffffffu, words.y, 0),
                       __shfl_sync(0xffffffffu, words.z, 0), __shfl_sync(0xffffffffu, words.w, 0)});
      return true;
    }
    return false;
  }
  __device__ __forceinline__ void complete_grad_q(Accumulator<1, 8>& dq, const float* staged,
                                                  const CompleteStep& complete) {
    if (complete.adds != 0) {
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        const float4 sums = *reinterpret_cast<const float4*>(staged + block * 128);
        dq[0][block][0] += sums.x;
        dq[0][block][1] += sums.y;
        dq[0][block][2] += sums.z;
        dq[0][block][3] += sums.w;
      }
    }
    const float scale = static_cast<float>(attention.scale), scales[2] = {scale, scale};
    const int row = own_query() + lane / 4, column = kSharesColumns ? warpgroup * 64 : 0;
    store_quads(
        dq, scales,
        row_of<Element>(attention.grad_q, int64_t{complete.query_row} + row, complete.head) +
            column,
        attention.grad_q.row_stride, complete.rows - row, attention.dim_qk - column, lane);
  }
  // What is in shared memory of dQ may be added to its sums; behind a fence and a barrier of the
  // warp. The fence is that of the next dS, which saves waiting for another.
  __device__ __forceinline__ void send_grad_q() {
    if (Config::kOrdered && is_staged) ptx::mbarrier_arrive(shared.sums_full[warpgroup]);
    if (!Config::kOrdered && lane == 0 && sums != nullptr) {
      constexpr int kBytes = LongWorkspace<Config>::kChunk * 4;
      const float* staged = shared.sGradQ[warpgroup * 4 + warp];
      int stores = flags.stores();
      if (stores == 0) {
        ptx::cp_reduce_async_bulk_add(sums, staged, kBytes);
        ptx::cp_async_bulk_commit();
      }
      // A loop, which runs once, stays out of the way of the other copy; a branch becomes predicates on
      // both.
#pragma unroll 1
      while (stores != 0) {
        ptx::cp_async_bulk_store(sums, staged, kBytes);
        ptx::cp_async_bulk_commit();
        asm volatile("mov.b32 %0, 0;\n" : "=r"(stores));
      }
    }
    is_staged = false;
    sums = nullptr;
  }
  // Other tiles of keys may add to what this warp has stored of dQ, once that has arrived. Lane 0.
  __device__ __forceinline__ void pass_on(const KeyItem& item) {
    ptx::cp_async_bulk_wait();
    ptx::fence_proxy_async();
    ptx::red_release_gpu_add(LongWorkspace<Config>::item_ticket(attention, item), 1);
  }
  __device__ __forceinline__ void send_grad_q_now() {
    ptx::fence_proxy_async();
    __syncwarp();
    send_grad_q();
  }

  // --- steps

  // P and dS of a step whose two products are the last in flight.
  __device__ __forceinline__ void finish_step(Accumulator<1, kScoreBlocks>& s,
                                              Accumulator<1, kScoreBlocks>& dp, Packed& p,
                                              Packed& ds, const KeyItem& item) {
    Accumulator<1, kScoreBlocks> probs;
    ptx::wgmma_wait_group<1>();
    finish_scores(s, probs, item);
    p = Packed(probs);
    ptx::wgmma_wait_group<0>();
    finish_grad_probs(probs, dp);
    ds = Packed(probs);
  }
  // A step before which no product is in flight; the first waits for K and V, too.
  __device__ __forceinline__ void run_scores(Packed& p, Packed& ds, const KeyItem& item,
                                             bool is_first) {
    if (is_first) wait_for_rows(shared.keys_full, shared.sK, item);
    wait_for_step();
    Accumulator<1, kScoreBlocks> s, dp;
    start_scores(s);
    if (is_first) {
      wait_for_rows(shared.values_full, shared.sV, item);
      keys_parity ^= 1;
    }
    start_grad_probs(dp);
    finish_step(s, dp, p, ds, item);
  }
  // dV += P^T dO, dK += dS^T Q; dV, whose operands are ready, starts before dS has reached shared
  // memory.
  __device__ __forceinline__ LateStep start_sums(const Packed& p, const Packed& ds) {
    write_grad_scores(ds);
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(dv, p, shared.sGradOut[stage]);
    const LateStep late = publish_grad_scores();
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(dk, ds, shared.sQ[stage]);
    ptx::wgmma_commit_group();
    return late;
  }
  // All products on this step's Q and dO are done.
  __device__ __forceinline__ void finish_sums() {
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    shared.ring.release(stage);
    flags = {step.next};
  }

  // All steps of an item.
  __device__ __forceinline__ void run_steps(const KeyItem& item) {
    Packed p, ds;
    LateStep late;
    run_scores(p, ds, item, true);
    if (!flags.is_last()) {
      late = start_sums(p, ds);
      ptx::wgmma_wait_group<0>();
      finish_sums();
      run_scores(p, ds, item, false);
      while (!flags.is_last()) {  // `late` is the step before; what follows the scores is the next
        const LateStep own = start_sums(p, ds);
        Accumulator<1, 8> dq;
        start_grad_q(dq, late);
        ptx::wgmma_wait_group<1>();
        finish_sums();
        wait_for_step();
        Accumulator<1, kScoreBlocks> s, dp;
        start_scores(s);
        ptx::wgmma_wait_group<1>();
        stage_grad_q(dq, late);
        if constexpr (!Config::kSendsLate) send_grad_q_now();
        late = own;
        start_grad_probs(dp);
        finish_step(s, dp, p, ds, item);
      }
      Accumulator<1, 8> dq;
      start_grad_q(dq, late);
      ptx::wgmma_wait_group<0>();
      if constexpr (Config::kSendsLate) send_grad_q_now();
      stage_grad_q(dq, late);
      if constexpr (!Config::kSendsLate) send_grad_q_now();
    }
    late = start_sums(p, ds);
    Accumulator<1, 8> dq;
    start_grad_q(dq, late);
    ptx::wgmma_wait_group<1>();
    finish_sums();
    const int row = warpgroup * 64 + warp * 16;
    send_sums(shared.sV, row, grad_v, attention.grad_v, dv, 1.0f, item, attention.dim_v);
    ptx::wgmma_wait_group<0>();
    stage_grad_q(dq, late);  // without an order dV has been read by then
    if (lane == 0) ptx::mbarrier_arrive(shared.keys_empty);
    send_grad_q_now();
    wait_until_sent();
    const float scale = static_cast<float>(attention.scale);
    if constexpr (Config::kOrdered) {
      send_sums(shared.sV, row, grad_k, attention.grad_k, dk, scale, item, attention.dim_qk);
    } else {
      send_sums(shared.staged_rows(warpgroup * 4 + warp), 0, grad_k, attention.grad_k, dk, scale,
                item, attention.dim_qk);
    }
  }

  // --- an item

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int e = 0; e < kOutBlocks * 4; ++e) dk[0][e / 4][e % 4] = dv[0][e / 4][e % 4] = 0.0f;
  }

  // dV or dK of this warp's keys, by way of 16 rows of a tile that nobody reads any more: as one bulk
  // copy, or where there are fewer by its lanes.
  template <typename Tile>
  __device__ __forceinline__ void send_sums(Tile& tile, int tile_row, const CUtensorMap& map,
                                            const HeadsView& grad,
                                            const Accumulator<1, kOutBlocks>& sum, float scale,
                                            const KeyItem& item, int columns) {
    const float scales[2] = {scale, scale};
    const int row = warpgroup * 64 + warp * 16, rows = item.keys - row;
    write_rows(tile, tile_row, sum, scales, lane);
    if (rows >= kStoredRows) {
      send_rows(map, tile, tile_row, item.key_begin + row, item.kv_head, lane);
    } else {
      copy_rows(
          row_of<Element>(grad, int64_t{item.key_begin} + row, item.kv_head),
          [&](int of) { return of * grad.row_stride; }, tile, tile_row, rows, columns, lane);
      __syncwarp();
    }
  }
  // Until the copies that lane 0 has started have read what they copy. What follows in send_sums() is
  // one instruction of the whole warp; a barrier here, or a branch of lane 0's, costs the loop over steps
  // its uniform registers.
  __device__ __forceinline__ void wait_until_sent() const { ptx::cp_async_bulk_wait_read(); }
  // dK and dV of keys that no query sees.
  __device__ __forceinline__ void store_zeros_of(const HeadsView& grad, const KeyItem& item,
                                                 int columns) const {
    Element* g = row_of<Element>(grad, item.key_begin, item.kv_head);
#pragma unroll 1
    for (int index = threadIdx.x % 128; index < 64 * (Config::kDim / 8); index += 128) {
      const int row = warpgroup * 64 + index / (Config::kDim / 8),
                column = index % (Config::kDim / 8) * 8;
      if (row < item.keys && column < columns)
        ptx::st_global_16(g + row * grad.row_stride + column, make_uint4(0, 0, 0, 0));
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const KeyItem& item = shared.item[stage];
      if (item.is_end) break;
      const StepRange<kStep> range(item, queries_window(attention, item));
      if (range.count > 0) {
        reset();
        flags = {item.first_step};
        run_steps(item);
        if (lane == 0) {
          if (Config::kOrdered) ptx::cp_async_bulk_wait_read();  // dK, from V's place
          ptx::mbarrier_arrive(shared.values_empty);
        }
      } else {
        store_zeros_of(attention.grad_k, item, attention.dim_qk);
        store_zeros_of(attention.grad_v, item, attention.dim_v);
      }
      if (!Config::kOrdered && lane == 0 && item.joins == JoinsSums::kStores) pass_on(item);
      shared.items.release(stage);
    }
    if (lane == 0) ptx::cp_async_bulk_wait();
  }
};

}  // namespace jagged_cuda::attention
