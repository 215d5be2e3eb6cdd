// HEADER
#pragma once

#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/attention/long_plan.cuh"
#include "cuda/kernels/prim/ring.cuh"

namespace jagged_cuda::attention {

#ifndef LONG_TILE_N
#define LONG_TILE_N 128
#endif
#ifndef LONG_SLOTS
#define LONG_SLOTS 4
#endif
#ifndef LONG_D64_GROUPS
#define LONG_D64_GROUPS 3
#endif
#ifndef LONG_D128_GROUPS
#define LONG_D128_GROUPS 2
#endif
#ifndef LONG_ENFORCE
#define LONG_ENFORCE 1
#endif
#ifndef LONG_QREG
#define LONG_QREG 0
#endif
#ifndef LONG_PASS
#define LONG_PASS 0
#endif
#ifdef LONG_CLOCK
__device__ long long g_clock[3][64][8];
#define STAMP(i) do { if (blockIdx.x == 7 && threadIdx.x % 128 == 0 && step_count < 64) { g_clock[warpgroup][step_count][i] = clock64(); } } while (0)
#else
#define STAMP(i)
#endif
#ifndef LONG_TURNS
#define LONG_TURNS 1
#endif

template <typename Element_, int kDim_>
struct LongForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  static constexpr int kWarpgroups = kDim == 64 ? LONG_D64_GROUPS : LONG_D128_GROUPS;  // that compute, 64 rows each
  static constexpr int kTileM = kWarpgroups * 64;
  static constexpr int kTileN = LONG_TILE_N;
  static constexpr int kSlots = LONG_SLOTS;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr PathName kName = PathName("cuda.attention.forward.long.d") + kDim;
  static_assert(kDim == 64 || kDim == 128);
};

struct LongForwardParams {
  CUtensorMap q;  // boxes of kTileM rows of one head
  CUtensorMap k;  // boxes of kTileN rows
  CUtensorMap v;
  AttentionParams attention;
  LongPlan* plan;
};

// What the warps that compute are to do next.
struct WorkItem {
  QueryTile tile;
  int head;
  bool last;  // there is none
};

template <typename Config>
struct LongForwardStorage {
  using Element = typename Config::Element;
  static constexpr int kItems = 2;
  using QueryRows = WarpgroupTile<Element, Config::kTileM, Config::kDim>;
  using KeyRows = WarpgroupTile<Element, Config::kTileN, Config::kDim>;
  QueryRows sQ[kItems];
  KeyRows slots[Config::kSlots];
  Ring<kItems> items;  // of item[] and sQ[]
  uint64_t q_full[kItems];
  Ring<Config::kSlots> ring;  // of slots[]
  WorkItem item[kItems];
};

// --- the producers

// Finds the items of this CTA, one ahead; one warp.
template <typename Config>
__device__ __forceinline__ void schedule(const LongForwardParams& params,
                                         LongForwardStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  typename Ring<2>::Position place;
  const auto publish = [&](const WorkItem& item) {
    shared.items.acquire(place);
    if (threadIdx.x % 32 == 0) {
      shared.item[place.stage] = item;
      ptx::mbarrier_arrive(shared.items.full[place.stage]);
    }
    __syncwarp();
    place.advance();
  };
  const bool descending = attention.window_right < AttentionParams::kUnbounded;
  ptx::griddepcontrol_wait();
  PlannedItems items(params.plan, attention.heads);
  PlannedSequence sequence;
  int64_t index;
  while (items.next(sequence, index)) {
    const int tiles = (sequence.num_queries + Config::kTileM - 1) / Config::kTileM;
    // Wrong offsets make a plan whose numbers overflow.
    if (index < 0 || index >= static_cast<int64_t>(tiles) * attention.heads) continue;
    const int tile = static_cast<int>(index % tiles);
    RowRange kv = sequence.seq < 0 ? RowRange{0, 0} : RowRange{sequence.begin, sequence.num_queries};
    if (sequence.seq >= 0 && attention.kv_offsets.data != attention.q_offsets.data)
      kv = sequence_rows(attention.kv_offsets, sequence.seq);
    WorkItem item;
    item.tile.row = (descending ? tiles - 1 - tile : tile) * Config::kTileM;
    item.tile.global_row = sequence.begin + item.tile.row;
    item.tile.key_begin = kv.begin;
    item.tile.num_queries = sequence.num_queries;
    item.tile.rows = min(Config::kTileM, item.tile.num_queries - item.tile.row);
    item.tile.num_keys = static_cast<int>(kv.len);
    item.head = static_cast<int>(index / tiles);
    item.last = false;
    publish(item);
  }
  WorkItem end = {};
  end.last = true;
  publish(end);
}

// Copies Q, K and V of the items, in the order of their use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_operands(const LongForwardParams& params,
                                              LongForwardStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  typename Ring<2>::Position place;
  typename Ring<Config::kSlots>::Position slot;
  for (;;) {
    shared.items.wait(place);
    const WorkItem item = shared.item[place.stage];
    const int item_stage = place.advance();
    shared.items.release(item_stage);
    if (item.last) return;
    const KeyRange keys(item.tile, window_of(attention, item.tile), Config::kTileN);
    if (keys.first >= keys.last) continue;
    const auto copy = [&](const CUtensorMap& map, int key) {
      shared.ring.acquire(slot);
      copy_tile(shared.slots[slot.stage], map, item.tile.key_begin + key, item.head / group,
                shared.ring.full[slot.stage]);
      slot.advance();
    };
    copy_tile(shared.sQ[item_stage], params.q, item.tile.global_row, item.head,
              shared.q_full[item_stage]);
    copy(params.k, keys.first);
    for (int key = keys.first; key < keys.last; key += Config::kTileN) {
      if (key + Config::kTileN < keys.last) copy(params.k, key + Config::kTileN);
      copy(params.v, key);
    }
  }
}

// --- the warpgroups that compute

#ifndef LONG_KEEP
#define LONG_KEEP 0
#endif
#ifndef LONG_SM
#define LONG_SM 0
#endif
#ifndef LONG_LAG
#define LONG_LAG 2
#endif
#ifndef LONG_CHUNK
#define LONG_CHUNK 4
#endif
#ifndef LONG_VOL
#define LONG_VOL 0
#endif
#ifndef LONG_POLY
#define LONG_POLY 0
#endif

// 2^x for x <= about 0 (and not below -126 by more than is rounded away), on the FMA units
__device__ __forceinline__ float ex2_fma(float x) {
  x = fmaxf(x, -126.0f);
  const float magic = x + 12582912.0f;           // rounds to an integer in the low bits
  const float fraction = x - (magic - 12582912.0f);  // [-0.5, 0.5]
  float y = __fmaf_rn(fraction, 0.009618129f, 0.055503324f);
  y = __fmaf_rn(y, fraction, 0.24022651f);
  y = __fmaf_rn(y, fraction, 0.69314718f);
  y = __fmaf_rn(y, fraction, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(magic) << 23));
}

// Online softmax whose reference follows the maximum only where it has fallen behind by 2^kSlack:
// sums stay exact, since the reference cancels, and O is seldom rescaled.
struct LazySoftmax {
  static constexpr float kLimit = 4096.0f;
  float row_max[2];
  float row_sum[2];
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = -INFINITY;
      row_sum[half] = 0.0f;
    }
  }
  template <int kBlocks>
  __device__ __forceinline__ static float maximum(const Accumulator<1, kBlocks>& s, int half) {
    constexpr int kChains = 4;
    float chain[kChains];
#pragma unroll
    for (int i = 0; i < kChains; ++i) chain[i] = fmaxf(s[0][i][2 * half], s[0][i][2 * half + 1]);
#pragma unroll
    for (int block = kChains; block < kBlocks; ++block) {
      chain[block % kChains] =
          fmaxf(chain[block % kChains], fmaxf(s[0][block][2 * half], s[0][block][2 * half + 1]));
    }
    return quad_max(fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3])));
  }
  // The compiler moves the readers of an exponential right behind it, where they wait for it. They
  // cannot leave a basic block: what is never true ends one.
  __device__ __forceinline__ void end_block() const {
    if (row_sum[0] < 0.0f) __nanosleep(1);
  }
  template <int kBlocks>
  __device__ __forceinline__ void exponentiate(Accumulator<1, kBlocks>& s, int half, int first,
                                               int last, float shift, float scale_log2) const {
#pragma unroll
    for (int block = first; block < last; ++block) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const float x = __fmaf_rn(s[0][block][i], scale_log2, -shift);
        s[0][block][i] = LONG_POLY && block % 4 == 3 ? ex2_fma(x) : ptx::ex2_approx(x);
      }
    }
  }
  template <typename Element, int kBlocks>
  __device__ __forceinline__ void collect(const Accumulator<1, kBlocks>& s,
                                          PackedRows<Element, kBlocks>& p, float (&sum)[2][2],
                                          int half, int first, int last) const {
#pragma unroll
    for (int block = first; block < last; ++block) {
      const float low = s[0][block][2 * half], high = s[0][block][2 * half + 1];
      sum[half][0] += low;
      sum[half][1] += high;
      uint32_t& packed = p.fragments[block / 2][block % 2 * 2 + half];
      packed = pack<Element>(low, high);
      asm volatile("" : "+r"(packed));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) asm volatile("" : "+f"(sum[half][i]));
  }
  // Turns scores into probabilities relative to `next`, rounded, in p, which may be written after
  // finish_output().
  template <typename Element, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ void probabilities(Accumulator<1, kBlocks>& s,
                                                PackedRows<Element, kBlocks>& p,
                                                float (&sum)[2][2], const float (&next)[2],
                                                float scale_log2,
                                                FinishOutput finish_output) const {
    constexpr int kHalf = kBlocks / 2;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shift[half] = next[half] == -INFINITY ? 0.0f : next[half] * scale_log2;
#if LONG_SM == 0
    finish_output();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        exponentiate(s, half, block, block + 1, shift[half], scale_log2);
        collect(s, p, sum, half, block, block + 1);
      }
    }
#else
    exponentiate(s, 0, 0, kBlocks, shift[0], scale_log2);
    end_block();
    finish_output();
    exponentiate(s, 1, 0, kHalf, shift[1], scale_log2);
    collect(s, p, sum, 0, 0, kBlocks);
    end_block();
    exponentiate(s, 1, kHalf, kBlocks, shift[1], scale_log2);
    collect(s, p, sum, 1, 0, kHalf);
    end_block();
    collect(s, p, sum, 1, kHalf, kBlocks);
#endif
  }
  // A step that keeps the reference. False where that cannot be: nothing has changed then but p.
  template <typename Element, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ void keep(Accumulator<1, kBlocks>& s,
                                       PackedRows<Element, kBlocks>& p, float (&sum)[2],
                                       float scale_log2, FinishOutput finish_output) const {
    float sums[2][2] = {};
    probabilities(s, p, sums, row_max, scale_log2, finish_output);
    sum[0] = sums[0][0] + sums[0][1];
    sum[1] = sums[1][0] + sums[1][1];
  }
  // A step that moves the reference where it has fallen behind. True where what was summed so far is
  // to be multiplied by `rescale`.
  template <typename Element, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool follow(Accumulator<1, kBlocks>& s,
                                         PackedRows<Element, kBlocks>& p, float (&rescale)[1][2],
                                         float scale_log2, float slack,
                                         FinishOutput finish_output) {
    float next[2], sum[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = maximum(s, half);
      next[half] = top > row_max[half] + slack ? top : row_max[half];
    }
    probabilities(s, p, sum, next, scale_log2, finish_output);
    const bool moved = __any_sync(0xffffffffu, next[0] != row_max[0] || next[1] != row_max[1]);
    if (moved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rescale[0][half] = next[half] == row_max[half]
                               ? 1.0f
                               : ptx::ex2_approx((row_max[half] - next[half]) * scale_log2);
        row_max[half] = next[half];
        row_sum[half] *= rescale[0][half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] += sum[half][0] + sum[half][1];
    return moved;
  }
  __device__ __forceinline__ bool fits(const float (&sum)[2], int half) const {
    return sum[half] < kLimit && row_max[half] != -INFINITY;
  }
  // A step that moves the reference of these rows to their maximum; what was summed so far is to be
  // multiplied by `rescale`.
  template <typename Element, int kBlocks>
  __device__ __forceinline__ void move(Accumulator<1, kBlocks>& s,
                                       PackedRows<Element, kBlocks>& p, const bool (&moves)[2],
                                       float (&rescale)[1][2], float scale_log2) {
    float sum[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = moves[half] ? fmaxf(row_max[half], maximum(s, half)) : row_max[half];
      rescale[0][half] = next == row_max[half]
                             ? 1.0f
                             : ptx::ex2_approx((row_max[half] - next) * scale_log2);
      row_max[half] = next;
      row_sum[half] *= rescale[0][half];
    }
    probabilities(s, p, sum, row_max, scale_log2, [] {});
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] += sum[half][0] + sum[half][1];
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] = quad_sum(row_sum[half]);
  }
};

// The mask of rows that see all columns up to some last one: half the instructions.
template <int kBlocks>
__device__ __forceinline__ void hide_from(Accumulator<1, kBlocks>& s, const WindowOf<int>& window,
                                          int row, int column, int num_columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int columns = min(row + 8 * half + window.diagonal + window.after + 1, num_columns) -
                        column - 2 * (lane % 4);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (block * 8 + i >= columns) s[0][block][2 * half + i] = -INFINITY;
      }
    }
  }
}

template <typename Config>
struct ForwardConsumer {
  using Element = typename Config::Element;
  using Storage = LongForwardStorage<Config>;
  static constexpr int kTileN = Config::kTileN, kScoreBlocks = kTileN / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kTurnBarrier = 1, kZeroBarrier = kTurnBarrier + Config::kWarpgroups;

  const AttentionParams& attention;
  Storage& shared;
  const int warpgroup, lane, own_row;
  const float scale, scale_log2, slack;
  typename Ring<Config::kSlots>::Position slot;
  typename Ring<2>::Position place;
  int q_parities = 0;  // a bit per stage
  LazySoftmax softmax;
  Accumulator<1, kScoreBlocks> s;
  Accumulator<1, kOutBlocks> o;
  PackedRows<Element, kScoreBlocks> p;
  PackedRows<Element, Config::kDim / 8> q;
  float rescale[1][2];

  __device__ __forceinline__ ForwardConsumer(const AttentionParams& params, Storage& storage,
                                             int group)
      : attention(params),
        shared(storage),
        warpgroup(group),
        lane(threadIdx.x % 32),
        own_row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4),
        scale(static_cast<float>(params.scale)),
        scale_log2(fmaxf(fabsf(scale) * kLog2E, 1e-30f)),
        slack(8.0f / scale_log2) {}

  // The warpgroups' products go to the tensor cores in turn.
  __device__ __forceinline__ void take_turn() const {
    if (LONG_TURNS) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (LONG_TURNS)
      ptx::bar_arrive(
          kTurnBarrier + (warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1), 256);
  }
  __device__ __forceinline__ void release_slot(int stage) {
    if (lane == 0) shared.ring.release(stage);
  }

  __device__ __forceinline__ void wait_for_queries(int stage) {
    ptx::mbarrier_wait(shared.q_full[stage], q_parities >> stage & 1);
    q_parities ^= 1 << stage;
  }

  __device__ __forceinline__ void load_queries(int stage) {
    if (!LONG_QREG) return;
    auto& tile = shared.sQ[stage];
    const int tile_row = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < Config::kDim; k += 16)
      ptx::ldmatrix_x4(q.fragments[k / 16], tile.chunk(tile_row, k / 8 + lane / 16));
  }

  // S = Q K^T
  __device__ __forceinline__ void start_scores(int item_stage, int stage) {
    ptx::wgmma_fence();
    if (LONG_QREG) {
      using Product = ptx::Wgmma<Element, false>;
      const ptx::MatrixDescriptor b_rows = shared.slots[stage].descriptor();
#pragma unroll
      for (int k = 0; k < Config::kDim; k += 16)
        Product::run(s[0], q.fragments[k / 16], b_rows + Storage::KeyRows::column_step_bytes(k),
                     k > 0);
    } else {
      wgmma_rows_by_rows(s, shared.sQ[item_stage], warpgroup * 64, shared.slots[stage]);
    }
    ptx::wgmma_commit_group();
  }
  // P = softmax step of S, the scores of keys from `key` on.
  __device__ __forceinline__ void finish_scores(const WindowOf<int>& window, int row, int key,
                                                int num_keys) {
    ptx::fence_operands(s[0]);
    if (scale < 0.0f) {
#pragma unroll
      for (int e = 0; e < kScoreBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
    }
    if (window.cuts_tile(row, 64, key, kTileN, num_keys)) {
      if (row + 63 + window.diagonal - window.before > key) {
        replace_unseen(s, -INFINITY, window, row + own_row, key, num_keys, lane);
      } else {
        hide_from(s, window, row + own_row, key, num_keys, lane);
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
  // Rows of V past the sequence's end become zeros.
  __device__ __forceinline__ void zero_values(int stage, int rows) {
    if (rows >= kTileN) return;
    auto& tile = shared.slots[stage];
    for (int index = threadIdx.x % 128; index < (kTileN - rows) * Storage::KeyRows::kChunks;
         index += 128) {
      *reinterpret_cast<uint4*>(
          tile.chunk(rows + index / Storage::KeyRows::kChunks, index % Storage::KeyRows::kChunks)) =
          make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kZeroBarrier + warpgroup, 128);
  }

  __device__ __forceinline__ void store_item(const WorkItem& item) {
    softmax.finish();
    const int head = item.head, rows = item.tile.rows - warpgroup * 64 - own_row;
    const int64_t global_row = item.tile.global_row + warpgroup * 64 + own_row;
    float inverse_sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[half];
      inverse_sum[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && half * 8 < rows) {
        static_cast<float*>(attention.lse)[(global_row + half * 8) * attention.heads + head] =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(softmax.row_max[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
    store_quads(o, inverse_sum, row_of<Element>(attention.out, global_row, head),
                attention.out.row_stride, rows, attention.dim_v, lane);
  }
  __device__ __forceinline__ void reset() {
    softmax.reset();
#pragma unroll
    for (int e = 0; e < kOutBlocks * 4; ++e) o[0][e / 4][e % 4] = 0.0f;
  }

  __device__ __forceinline__ void run() {
#ifdef LONG_CLOCK
    int step_count = 0;
#endif
    bool pending = false;  // O of the item before lacks its last product
    int pending_stage = 0, pending_rows = 0;
    if (warpgroup == Config::kWarpgroups - 1) pass_turn();
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const WorkItem& item = shared.item[stage];
      const QueryTile tile = item.tile;
      const bool last = item.last;
      const WindowOf<int> window = window_of(attention, tile);
      KeyRange keys(tile, window, kTileN);
      const bool has_keys = !last && keys.first < keys.last;
      const int row = tile.row + warpgroup * 64;
      const bool active = has_keys && warpgroup * 64 < tile.rows;

      int value_stage = 0;
      if (pending) {
        shared.ring.wait(slot);
        value_stage = slot.advance();
        zero_values(value_stage, pending_rows);
      }
      if (!active) {
        if (pending) {
          take_turn();
          start_output(value_stage);
          pass_turn();
          finish_output(value_stage);
          store_item(shared.item[pending_stage]);
          if (lane == 0) shared.items.release(pending_stage);
          pending = false;
        } else {
          take_turn();
          pass_turn();
        }
        if (last) return;
        if (has_keys) {
          // The other warpgroups' turns.
          wait_for_queries(stage);
          for (int key = keys.first; key < keys.last; key += kTileN) {
            if (key != keys.first) {
              take_turn();
              pass_turn();
            }
            for (int i = 0; i < 2; ++i) {
              shared.ring.wait(slot);
              release_slot(slot.advance());
            }
          }
        } else {
          reset();
          store_item(item);
        }
        if (lane == 0) shared.items.release(stage);
        continue;
      }

      wait_for_queries(stage);
      load_queries(stage);
      shared.ring.wait(slot);
      const int first_stage = slot.advance();
      if (pending) {
        take_turn();
        start_scores(stage, first_stage);
        start_output(value_stage);
        pass_turn();
        finish_output(value_stage);
        ptx::fence_operands(s[0]);
        store_item(shared.item[pending_stage]);
        if (lane == 0) shared.items.release(pending_stage);
      } else {
        take_turn();
        start_scores(stage, first_stage);
        pass_turn();
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(s[0]);
      }
      release_slot(first_stage);
      reset();
      finish_scores(window, row, keys.first, tile.num_keys);
      softmax.move(s, p, {true, true}, rescale, scale_log2);
      const int own_rows = tile.rows - warpgroup * 64 - own_row;
      bool k_ready = shared.ring.test(slot);
      int key = keys.first + kTileN;
      for (; key < keys.last; key += kTileN) {
        if (!k_ready) shared.ring.wait(slot);
        const int score_stage = slot.advance();
        STAMP(0);
        take_turn();
        STAMP(1);
        start_scores(stage, score_stage);
        STAMP(2);
        shared.ring.wait(slot);
        value_stage = slot.advance();
        start_output(value_stage);
        STAMP(3);
        pass_turn();
        ptx::wgmma_wait_group<1>();
        STAMP(4);
        finish_scores(window, row, key, tile.num_keys);
#if LONG_KEEP
        float sum[2];
        softmax.keep(s, p, sum, scale_log2, [&] {
          STAMP(5);
          finish_output(value_stage);
          k_ready = shared.ring.test(slot);
          STAMP(6);
        });
        bool moves[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          moves[half] = half * 8 < own_rows && !softmax.fits(sum, half);
        if (ptx::bar_red_or(kZeroBarrier + warpgroup, 128, moves[0] || moves[1])) {
          // Once more, relative to a higher maximum. S was overwritten.
#pragma unroll
          for (int half = 0; half < 2; ++half)
            moves[half] = quad_max(moves[half] ? 1.0f : 0.0f) > 0.0f;
          start_scores(stage, score_stage);
          ptx::wgmma_wait_group<0>();
          finish_scores(window, row, key, tile.num_keys);
          softmax.move(s, p, moves, rescale, scale_log2);
          rescale_rows(o, rescale);
        } else {
          softmax.row_sum[0] += sum[0];
          softmax.row_sum[1] += sum[1];
        }
        release_slot(score_stage);
#else
        release_slot(score_stage);
        const bool moved = softmax.follow(s, p, rescale, scale_log2, slack, [&] {
          STAMP(5);
          finish_output(value_stage);
          k_ready = shared.ring.test(slot);
          STAMP(6);
        });
        if (moved) rescale_rows(o, rescale);
#endif
#ifdef LONG_CLOCK
        if (p.fragments[0][0] == 0x12345 && p.fragments[kTileN / 16 - 1][3] == 0x23456) __nanosleep(1);
        STAMP(7);
        ++step_count;
#endif
      }
      pending = true;
      pending_stage = stage;
      pending_rows = tile.num_keys - (key - kTileN);
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
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 0) schedule<Config>(params, shared);
    if (threadIdx.x == 32) copy_operands<Config>(params, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ForwardConsumer<Config>(params.attention, shared, warpgroup - 1).run();
  }
}

inline int num_sms() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;
  return count;
}

template <typename Config>
cudaError_t launch_long_forward(const AttentionParams& attention, void* workspace,
                                cudaStream_t stream) {
  using Storage = LongForwardStorage<Config>;
  LongForwardParams params;
  params.attention = attention;
  params.plan = static_cast<LongPlan*>(workspace);
  const cudaError_t errors[] = {
      encode_heads<typename Storage::QueryRows>(params.q, attention, attention.q,
                                                attention.q_offsets.total, attention.heads,
                                                attention.dim_qk),
      encode_heads<typename Storage::KeyRows>(params.k, attention, attention.k,
                                              attention.kv_offsets.total, attention.kv_heads,
                                              attention.dim_qk),
      encode_heads<typename Storage::KeyRows>(params.v, attention, attention.v,
                                              attention.kv_offsets.total, attention.kv_heads,
                                              attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  const LongPlanParams plan_params{attention, params.plan, Config::kTileM};
  const cudaError_t error =
      launch<plan_long>(plan_params, Grid{1}, kPlanThreads, 0, stream, nullptr);
  if (error != cudaSuccess) return error;
  const int64_t items =
      num_tiles(attention.q_offsets.total, attention.q_offsets.num_seqs, Config::kTileM) *
      attention.heads;
  return launch_dependent<long_forward<Config>>(params, Grid{items < num_sms() ? items : num_sms()},
                                                Config::kThreads, sizeof(Storage), stream,
                                                Config::kName);
}

}  // namespace jagged_cuda::attention
