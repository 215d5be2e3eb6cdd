// Backward of jagged_flash_attention for long sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements. With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and
// dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// Kernels behind the plan (long_plan.cuh), whose items are tiles of kTileN keys:
//     prepare_long     lse and delta of all queries; zeros for the sums of dQ, or for the tickets
//     long_backward    the five products; dK and dV leave it, dQ is added to sums in f32
//     finish_long      the sums, rounded, to dQ; not where tiles of keys add in order
//
// long_backward, grid: one CTA per SM, which takes items (tile of keys, kv head) until there are no
// more. A CTA has a warpgroup of producers and two that compute 64 keys each. They work on S^T and
// dP^T, so that P^T and dS^T are operands in registers:
//
//     scheduler (one warp)     copier (one thread)              each computing warpgroup
//     for each item:           for each item:                   for each item:
//       take it, publish it      K, V                             for each step:
//                                for each step (head of             dS^T to shared memory
//     in order: a sender         the group, kStep queries):         start dV += P^T dO, dK += dS^T Q
//     (a thread) for each          Q, dO, lse, delta                start dQ = dS K of the step before
//     warpgroup, each step:                                         start S^T = K Q^T of the next step
//       wait for its turn                                           dQ to shared memory, add to sums
//       add dQ to its sums                                          start dP^T = V dO^T of the next step
//       let the next tile                                           P^T = exp2(...)
//                                                                   dS^T = P^T * (dP^T - delta)
//                                                                 store dK, dV
//
// A step's dQ, over all keys of the tile, is shared between the warpgroups: at 128 dims each takes
// half of the columns, at 64 half of the queries. That it comes one step late is why they need not
// keep step with each other: one is at its exponentials while the other has the tensor cores.
//
// What a step needs from shared memory outside of its products is loaded long before its use, and
// what it writes there is waited for as late as registers allow: while the tensor cores read their
// operands, both take hundreds of cycles.
//
// The sums of dQ lie in memory as the accumulators do in registers, in chunks of 16 queries and 64
// columns, each of which one warp adds in one piece (cp.reduce.async.bulk). Their order is that of
// arrival, so dQ may differ in its last bits from run to run; dK and dV do not.
//
// kOrdered: a sender adds a warpgroup's part of a step in one piece. Tiles of keys add in order: the
// part's ticket counts those that have. The first tile stores in place of adding, so nothing is
// cleared; for the last one what the others have added comes to shared memory, so that the warpgroup
// adds its own in registers and writes dQ. The bits are the same at every run. A tile waits only for
// those that were taken before it, so some tile can always go on. Tiles are taken in the order in which
// they add, heads fastest, and walk over the queries the other way, so that the tile before is ahead.
//
// Shared memory, in rows of 2 kDim bytes: K and V kTileN rows each; Q and dO kStep rows in kStages
// stages; dS [kTileN, kStep], kScoreStages times; 32 KiB through which dQ leaves. 195, 226 KiB for
// kDim 64, 128.
//
// Barriers:           arrives                              waits
//     items.full      scheduler                            copier, senders, computing warps
//     items.empty     copier, senders, computing threads   scheduler
//     wanted          copier, near the end of an item      scheduler, before it takes one in order
//     keys_full       copier, with the bytes of K, V       computing warps
//     keys_empty      computing warps, after an item       copier
//     ring.full       copier, with the bytes of a step     computing warps
//     ring.empty      computing threads, after its         copier
//                     products
//     scores_full     both warpgroups, dS is written       the same, before dQ
//     scores_empty    both warpgroups, dQ is computed      the same, before they write dS
//     sums_ready[w]   sender w: room for dQ, or the sum    warpgroup w
//                     of the other tiles is there
//     sums_full[w]    warpgroup w, dQ is there or done     sender w
//     kZeroed + w     warpgroup w                          the same, after it has written zeros
//
// A copy may reach into the next sequence: rows past the end are overwritten with zeros, since 0
// times NaN is NaN. Queries past the end, or that see nothing, have lse inf, so that P is 0.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_plan.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

#include <cmath>

namespace jagged_cuda::attention {

// kOrdered: tiles of keys add to dQ in order.
template <typename Element_, int kDim_, bool kOrdered_>
struct LongBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V, dO in shared memory
  static constexpr bool kOrdered = kOrdered_;
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileN = 128;
  // S and dP of a step take together 64 registers at 128 dims, 128 at 64.
  static constexpr int kStep = kDim == 64 ? kLongNarrowStep : kLongStep;
  static constexpr int kStages = kDim == 64 ? 2 : 3;  // as many as there is room for
  static constexpr int kScoreStages = 2;
  // Chunks of lse or delta that a lane loads ahead of their use, two pairs of queries each.
  // At 64 dims there are no registers for that.
  static constexpr int kStatisticsAhead = kDim == 128 ? 2 : 0;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // dQ is sent behind the fence of the next dS, which saves waiting for its own. At 64 dims there are
  // registers for that only where others send.
  static constexpr bool kSendsLate = kOrdered || kDim == 128;
  static constexpr PathName kName = PathName(kOrdered ? "cuda.attention.backward.long_ordered.d"
                                                      : "cuda.attention.backward.long.d") +
                                    kDim;
  static_assert(kDim == 64 || kDim == 128);
};

struct LongBackwardParams {
  CUtensorMap q;  // boxes of kStep rows of one head
  CUtensorMap grad_out;
  CUtensorMap k;  // boxes of kTileN rows
  CUtensorMap v;
  AttentionBackwardParams attention;
};

// --- the workspaces

template <typename Config>
struct LongWorkspace {
  static constexpr int kChunk = 16 * 64;                     // floats that a warp holds of dQ,
  static constexpr int kPart = 4 * kChunk;                   // a warpgroup,
  static constexpr int kSums = Config::kWarpgroups * kPart;  // and all of one step and head
  static_assert(kSums == Config::kStep * Config::kDim);

  // The step, in the workspaces, that holds row `row` of a sequence that begins at row `begin`, and
  // head.
  __device__ __forceinline__ static int64_t step(const AttentionBackwardParams& params,
                                                 int64_t begin, int row, int head) {
    return (long_unit<kLongMinRows, Config::kStep>(begin) + row / Config::kStep) * params.heads +
           head;
  }

  // lse and delta of its queries, one after the other, in the order of statistics_place().
  __device__ __forceinline__ static float* statistics(const AttentionBackwardParams& params,
                                                      int64_t step) {
    return params.long_statistics + step * (2 * Config::kStep);
  }
  // The pairs of queries that a lane has as columns of two blocks of scores, side by side.
  __device__ __forceinline__ static int statistics_place(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }
  // A warpgroup's part of its dQ.
  __device__ __forceinline__ static float* grad_q(const AttentionBackwardParams& params,
                                                  int64_t step, int warpgroup) {
    return params.long_grad_q + step * kSums + warpgroup * kPart;
  }
  __device__ __forceinline__ static int* ticket(const AttentionBackwardParams& params, int64_t step,
                                                int warpgroup) {
    return params.long_tickets + step * Config::kWarpgroups + warpgroup;
  }
};

// Which tiles of keys see some of the queries of the step at row `row`: exactly those in whose
// StepRange it is.
template <int kTileN, int kStep>
struct TileRange {
  int first;
  int last;  // first if there are none

  __device__ __forceinline__ TileRange(const WindowOf<int>& window, int row, int num_keys) {
    const int first_key = window.first_column(row),
              last_key = window.last_column(row, kStep, num_keys);
    first = first_key / kTileN;
    last = last_key > first_key ? (last_key + kTileN - 1) / kTileN : first;
  }
};

__device__ __forceinline__ WindowOf<int> keys_window(const AttentionParams& params, int num_queries,
                                                     int num_keys) {
  return {num_keys - num_queries, window_rows32(params.window_left),
          window_rows32(params.window_right)};
}

// --- what comes before: tiles of kPreparedRows queries of one head

constexpr int kPreparedRows = 128, kPrepareThreads = 256;

// Zeros for the sums of a tile of kPreparedRows queries.
template <typename Config>
__device__ __forceinline__ void clear_sums(const AttentionBackwardParams& params,
                                           const JaggedTile& tile, int rows, int head) {
  using Workspace = LongWorkspace<Config>;
  const int steps = (rows + Config::kStep - 1) / Config::kStep;
  for (int index = threadIdx.x; index < steps * (Workspace::kSums / 4); index += kPrepareThreads) {
    const int row = static_cast<int>(tile.row) + index / (Workspace::kSums / 4) * Config::kStep;
    float* sums = Workspace::grad_q(params, Workspace::step(params, tile.rows.begin, row, head),
                                    /*warpgroup=*/0);
    ptx::st_global_16(sums + index % (Workspace::kSums / 4) * 4, make_uint4(0, 0, 0, 0));
  }
}

template <typename Config>
__device__ __forceinline__ void prepare_tile(const AttentionBackwardParams& params,
                                             const JaggedTile& tile) {
  using Element = typename Config::Element;
  using Workspace = LongWorkspace<Config>;
  constexpr int kChunks = Config::kDim / 8, kRowStep = kPrepareThreads / kChunks,
                kRows = kPreparedRows / kRowStep;
  const int first_row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kPreparedRows, num_queries - first_row), head = blockIdx.y;
  const int chunk = threadIdx.x % kChunks, own_row = static_cast<int>(threadIdx.x) / kChunks;
  const bool has_chunk = chunk * 8 < params.dim_v;
  uint4 out[kRows], grad_out[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = own_row + i * kRowStep;
    const bool valid = has_chunk && row < rows;
    const int64_t global_row = tile.rows.begin + first_row + (valid ? row : 0);
    out[i] = ptx::ld_global_nc_16(row_of<Element>(params.out, global_row, head) + chunk * 8, valid);
    grad_out[i] =
        ptx::ld_global_nc_16(row_of<Element>(params.grad_out, global_row, head) + chunk * 8, valid);
  }
  if constexpr (!Config::kOrdered) clear_sums<Config>(params, tile, rows, head);
  if constexpr (Config::kOrdered) {
    // Queries that no key sees are in no step.
    const int num_keys = keys_of(params, tile.seq, num_queries);
    const WindowOf<int> window = keys_window(params, num_queries, num_keys);
#pragma unroll 1
    for (int first = 0; first < rows; first += Config::kStep) {
      const TileRange<Config::kTileN, Config::kStep> tiles(window, first_row + first, num_keys);
      if (tiles.first < tiles.last) continue;
      const int last = min(rows, first + Config::kStep);
      for (int row = first + own_row; row < last; row += kRowStep) {
        if (chunk * 8 < params.dim_qk)
          ptx::st_global_16(
              row_of<Element>(params.grad_q, tile.rows.begin + first_row + row, head) + chunk * 8,
              make_uint4(0, 0, 0, 0));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = own_row + i * kRowStep;
    float delta = 0.0f;
    const Element* a = reinterpret_cast<const Element*>(&out[i]);
    const Element* b = reinterpret_cast<const Element*>(&grad_out[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) delta += to_sum(a[e]) * to_sum(b[e]);
#pragma unroll
    for (int lanes = 1; lanes < kChunks; lanes *= 2)
      delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
    const int tile_rows = (rows + Config::kStep - 1) / Config::kStep * Config::kStep;
    if (chunk != 0 || row >= tile_rows) continue;
    float lse_log2 = INFINITY;
    if (row < rows) {
      const int64_t statistic = (tile.rows.begin + first_row + row) * params.heads + head;
      const float lse = static_cast<const float*>(params.lse)[statistic];
      if (lse != -INFINITY) lse_log2 = lse * kLog2E;
      if (params.grad_lse != nullptr)
        delta -= static_cast<const float*>(params.grad_lse)[statistic];
    }
    float* statistics = Workspace::statistics(params, Workspace::step(params, tile.rows.begin,
                                                                      first_row + row, head)) +
                        Workspace::statistics_place(row % Config::kStep);
    statistics[0] = lse_log2;
    statistics[Config::kStep] = delta;
  }
}

// The sums, rounded, to dQ.
template <typename Config>
__device__ __forceinline__ void finish_tile(const AttentionBackwardParams& params,
                                            const JaggedTile& tile) {
  using Element = typename Config::Element;
  using Workspace = LongWorkspace<Config>;
  constexpr int kChunks = Config::kDim / 64, kUnits = kPreparedRows / 16 * kChunks;
  const int first_row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kPreparedRows, num_queries - first_row), head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = static_cast<float>(params.scale), scales[2] = {scale, scale};
#pragma unroll
  for (int unit = warp; unit < kUnits; unit += kPrepareThreads / 32) {
    const int row = unit / kChunks * 16, column = unit % kChunks;
    if (row >= rows) continue;
    // At 128 dims a warpgroup has half of the columns, at 64 half of the queries.
    const int chunk = column * 4 + row % Config::kStep / 16;
    const float* source =
        Workspace::grad_q(params, Workspace::step(params, tile.rows.begin, first_row + row, head),
                          0) +
        chunk * Workspace::kChunk + lane * 4;
    Accumulator<1, 8> dq;
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      const float4 sums = __ldcs(reinterpret_cast<const float4*>(source + block * 128));
      dq[0][block][0] = sums.x;
      dq[0][block][1] = sums.y;
      dq[0][block][2] = sums.z;
      dq[0][block][3] = sums.w;
    }
    store_quads(dq, scales,
                row_of<Element>(params.grad_q, tile.rows.begin + first_row + row + lane / 4, head) +
                    column * 64,
                params.grad_q.row_stride, rows - row - lane / 4, params.dim_qk - column * 64, lane);
  }
}

// Calls visit(tile) for the tiles of long sequences, of which this CTA takes every gridDim.x-th.
template <typename Visit>
__device__ __forceinline__ void for_long_tiles(const AttentionBackwardParams& params, Visit visit) {
  const int64_t count = num_longer_tiles(params.q_offsets.total, kPreparedRows);
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const JaggedTile tile = find_longer_tile<kPreparedRows>(params.q_offsets, kPreparedRows, index);
    if (tile.seq >= 0 && tile.row < tile.rows.len && left_to_long(params, tile.rows.len))
      visit(tile);
  }
}
__device__ __forceinline__ bool plans_any(const AttentionBackwardParams& params) {
  return __ldcg(&static_cast<const LongPlan*>(params.long_plan)->num_sequences) > 0;
}

template <typename Config>
__global__ __launch_bounds__(kPrepareThreads) void prepare_long(
    const __grid_constant__ AttentionBackwardParams params) {
  ptx::griddepcontrol_wait();
  if (!plans_any(params)) return;
  if constexpr (Config::kOrdered) {
    // All tickets, whatever the offsets say: one that is not cleared could be waited for in vain.
    const int64_t tickets =
        num_long_tickets(params.q_offsets.total, params.heads, Config::kDim == 64);
    for (int64_t index =
             (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * kPrepareThreads + threadIdx.x;
         index < tickets; index += int64_t{gridDim.x} * gridDim.y * kPrepareThreads)
      params.long_tickets[index] = 0;
  }
  for_long_tiles(params, [&](const JaggedTile& tile) { prepare_tile<Config>(params, tile); });
}

template <typename Config>
__global__ __launch_bounds__(kPrepareThreads) void finish_long(
    const __grid_constant__ AttentionBackwardParams params) {
  ptx::griddepcontrol_wait();
  if (!plans_any(params)) return;
  for_long_tiles(params, [&](const JaggedTile& tile) { finish_tile<Config>(params, tile); });
}

// --- the kernel

struct KeyItem {
  int query_begin;  // in q
  int key_begin;    // the tile, in k and v
  int key;          // the tile's first key within the sequence
  int keys;         // of the tile
  int num_queries;
  int num_keys;
  int kv_head;
  int is_end;      // there are no more
  int first_step;  // flags
};

// Queries [query, query + kStep) of one head.
struct alignas(16) LongStep {
  float* grad_q;  // its sums, without an order
  int query;
  int next;  // flags of the next step: nothing waits for them when it begins
};

// Where a warpgroup leaves its part of a step's dQ that is complete. Rows are 0 where other tiles of
// keys still add to it.
struct alignas(16) CompleteStep {
  int query_row;  // in q
  int rows;
  int head;
  int adds;  // whether what other tiles have added is in shared memory
};

// What decides how a step runs, in one word.
struct StepFlags {
  int bits;

  __device__ __forceinline__ int rows() const { return bits & 0xff; }
  // Whether some query does not see a key of this warpgroup's.
  __device__ __forceinline__ bool cuts(int warpgroup) const { return bits >> (8 + warpgroup) & 1; }
  __device__ __forceinline__ bool is_last() const { return bits >> 16 & 1; }  // of the item
};

__device__ __forceinline__ WindowOf<int> queries_window(const AttentionParams& params,
                                                        const KeyItem& item) {
  return WindowOf<int>{item.num_keys - item.num_queries, window_rows32(params.window_left),
                       window_rows32(params.window_right)}
      .transposed();
}

// Steps of an item: for each head of the group all queries that see one of its keys. Without an order
// from some of the first on, so that the CTAs at work do not all add to the same sums.
template <int kStep>
struct StepRange {
  int first;
  int count;

  __device__ __forceinline__ StepRange(const KeyItem& item, const WindowOf<int>& queries_of)
      : first(queries_of.first_column(item.key) / kStep * kStep) {
    const int last = queries_of.last_column(item.key, item.keys, item.num_queries);
    count = last > first ? (last - first + kStep - 1) / kStep : 0;
  }
};

// Whether a sequence's tiles of keys are taken from the last to the first: where late keys are seen by
// more queries, they come first.
__device__ __forceinline__ bool keys_fall(const AttentionParams& params) {
  return params.window_left < AttentionParams::kUnbounded &&
         params.window_right >= AttentionParams::kUnbounded;
}

// Which queries a step takes, and its flags; `member` is a head's place in its group, and a step
// behind the last of one head is the first of the next.
template <typename Config>
class StepOrder {
 public:
  __device__ __forceinline__ StepOrder(const AttentionParams& attention, const KeyItem& item)
      : window_(queries_window(attention, item)),
        range_(item, window_),
        heads_(attention.heads / attention.kv_heads),
        rises_(!Config::kOrdered || keys_fall(attention)) {
    const bool rotates = !Config::kOrdered &&
                         attention.window_left >= AttentionParams::kUnbounded &&
                         attention.window_right >= AttentionParams::kUnbounded;
    if (rotates && range_.count > 0)
      start_ = static_cast<int>(static_cast<int64_t>(item.key) * range_.count / item.num_keys);
  }

  __device__ __forceinline__ int count() const { return range_.count; }
  __device__ __forceinline__ int query(int index) const {
    const int turned = start_ + index;
    const int step = turned < range_.count ? turned : turned - range_.count;
    return range_.first + (rises_ ? step : range_.count - 1 - step) * Config::kStep;
  }
  __device__ __forceinline__ int flags(const KeyItem& item, int member, int index) const {
    if (index == range_.count) {
      ++member;
      index = 0;
    }
    const int row = query(index);
    int bits = min(item.num_queries - row, Config::kStep);
#pragma unroll
    for (int w = 0; w < Config::kWarpgroups; ++w) {
      if (item.keys < (w + 1) * 64 ||
          window_.cuts_tile(item.key + w * 64, 64, row, Config::kStep, row + Config::kStep))
        bits |= 1 << (8 + w);
    }
    return member + 1 == heads_ && index + 1 == range_.count ? bits | 1 << 16 : bits;
  }

 private:
  WindowOf<int> window_;
  StepRange<Config::kStep> range_;
  int heads_;
  bool rises_;
  int start_ = 0;
};

template <typename Config>
struct LongBackwardStorage {
  using Element = typename Config::Element;
  static constexpr int kItems = 2;
  using QueryRows = WarpgroupTile<Element, Config::kStep, Config::kDim>;
  using KeyRows = WarpgroupTile<Element, Config::kTileN, Config::kDim>;
  using ScoreRows = WarpgroupTile<Element, Config::kTileN, Config::kStep>;
  KeyRows sK, sV;
  QueryRows sQ[Config::kStages], sGradOut[Config::kStages];
  ScoreRows sGradScores[Config::kScoreStages];
  float sGradQ[Config::kWarpgroups * 4][LongWorkspace<Config>::kChunk];  // a chunk of each warp
  float sStatistics[Config::kStages][2][Config::kStep];                  // lse and delta
  CompleteStep complete[Config::kWarpgroups];
  LongStep steps[Config::kStages];
  KeyItem item[kItems];
  Ring<kItems> items;
  Ring<Config::kStages> ring;
  uint64_t keys_full, keys_empty, wanted;
  uint64_t sums_full[Config::kWarpgroups], sums_ready[Config::kWarpgroups];
  uint64_t scores_full[Config::kScoreStages], scores_empty[Config::kScoreStages];
};
static_assert(sizeof(LongBackwardStorage<LongBackwardConfig<__half, 64, true>>) <= 227 * 1024);
static_assert(sizeof(LongBackwardStorage<LongBackwardConfig<__half, 128, true>>) <= 227 * 1024);

// Takes items from the plan; one warp.
template <typename Config>
__device__ __forceinline__ void schedule_keys(const LongBackwardParams& params,
                                              LongBackwardStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  RingPosition<LongBackwardStorage<Config>::kItems> place;
  const auto publish = [&](const KeyItem& item) {
    shared.items.acquire(place);
    if (threadIdx.x % 32 == 0) {
      shared.item[place.stage] = item;
      ptx::mbarrier_arrive(shared.items.full[place.stage]);
    }
    __syncwarp();
    place.advance();
  };
  PlannedItems items(static_cast<LongPlan*>(attention.long_plan), attention.kv_heads);
  PlannedSequence sequence;
  int64_t index = 0;
  int tile = 0, head = 0, wanted_parity = 1;
  for (;;) {
    if constexpr (Config::kOrdered) {
      ptx::mbarrier_wait(shared.wanted, wanted_parity);
      if (!items.next_apart(sequence, tile, head)) break;
    } else {
      if (!items.next(sequence, index)) break;
    }
    const RowRange kv = attention.kv_offsets.data == attention.q_offsets.data
                            ? RowRange{sequence.begin, sequence.num_queries}
                            : sequence_rows(attention.kv_offsets, sequence.seq);
    const int num_keys = static_cast<int>(kv.len);
    const int tiles = (num_keys + Config::kTileN - 1) / Config::kTileN;
    if constexpr (!Config::kOrdered) {
      tile = static_cast<int>(index % tiles);
      head = static_cast<int>(index / tiles);
    }
    KeyItem item;
    item.key = (keys_fall(attention) ? tiles - 1 - tile : tile) * Config::kTileN;
    item.query_begin = sequence.begin;
    item.key_begin = static_cast<int>(kv.begin) + item.key;
    item.keys = min(Config::kTileN, num_keys - item.key);
    item.num_queries = sequence.num_queries;
    item.num_keys = num_keys;
    item.kv_head = head;
    item.is_end = false;
    const StepOrder<Config> order(attention, item);
    item.first_step = order.count() > 0 ? order.flags(item, 0, 0) : 0;
    publish(item);
    wanted_parity ^= 1;
  }
  KeyItem end = {};
  end.is_end = true;
  publish(end);
}

// Copies what the items need, in the order of its use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_steps(const LongBackwardParams& params,
                                           LongBackwardStorage<Config>& shared) {
  using Storage = LongBackwardStorage<Config>;
  using Workspace = LongWorkspace<Config>;
  constexpr int kStepsAhead = 3;
  const AttentionBackwardParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<Storage::kItems> place;
  RingPosition<Config::kStages> slot;
  int keys_parity = 1;
  for (;;) {
    shared.items.wait(place);
    const KeyItem item = shared.item[place.stage];
    shared.items.release(place.advance());
    if (item.is_end) return;
    const StepOrder<Config> order(attention, item);
    int steps_left = group * order.count();
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
        const int64_t step = Workspace::step(attention, item.query_begin, query, head);
        shared.ring.acquire(slot);
        const int stage = slot.advance();
        shared.steps[stage] = {Workspace::grad_q(attention, step, 0), query,
                               order.flags(item, member, i + 1)};
        uint64_t& full = shared.ring.full[stage];
        ptx::mbarrier_arrive_expect_tx(
            full, 2 * sizeof(shared.sQ[0].data) + sizeof(shared.sStatistics[0]));
        const int64_t row = static_cast<int64_t>(item.query_begin) + query;
        copy_expected_tile(shared.sQ[stage], params.q, row, head, full);
        if (member == 0 && i == 0) {
          ptx::mbarrier_wait(shared.keys_empty, keys_parity);
          keys_parity ^= 1;
          ptx::mbarrier_arrive_expect_tx(shared.keys_full, 2 * sizeof(shared.sK.data));
          copy_expected_tile(shared.sK, params.k, item.key_begin, item.kv_head, shared.keys_full);
          copy_expected_tile(shared.sV, params.v, item.key_begin, item.kv_head, shared.keys_full);
        }
        copy_expected_tile(shared.sGradOut[stage], params.grad_out, row, head, full);
        ptx::cp_async_bulk(shared.sStatistics[stage], Workspace::statistics(attention, step),
                           sizeof(shared.sStatistics[0]), full);
      }
    }
  }
}

// Adds what a warpgroup computes of dQ to its sums, in the order of the tiles of keys; one thread.
template <typename Config>
__device__ __forceinline__ void send_sums(const LongBackwardParams& params,
                                          LongBackwardStorage<Config>& shared, int warpgroup) {
  using Storage = LongBackwardStorage<Config>;
  using Workspace = LongWorkspace<Config>;
  constexpr int kBytes = Workspace::kPart * 4;
  const AttentionBackwardParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  float* staged = shared.sGradQ[warpgroup * 4];
  RingPosition<Storage::kItems> place;
  int parity = 0;
  int* sent = nullptr;  // the ticket of sums that are on their way
  const auto finish = [&] {
    if (sent == nullptr) return;
    ptx::cp_async_bulk_wait();
    ptx::fence_proxy_async();
    ptx::red_release_gpu_add(sent, 1);
    sent = nullptr;
  };
  for (;;) {
    shared.items.wait(place);
    const KeyItem item = shared.item[place.stage];
    if (item.is_end) break;
    const StepOrder<Config> order(attention, item);
    const WindowOf<int> window = keys_window(attention, item.num_queries, item.num_keys);
    for (int member = 0; member < group; ++member) {
      const int head = item.kv_head * group + member;
      for (int i = 0; i < order.count(); ++i) {
        const int query = order.query(i), tile = item.key / Config::kTileN;
        const TileRange<Config::kTileN, Config::kStep> tiles(window, query, item.num_keys);
        // How many tiles add to this step before this one.
        const int before = keys_fall(attention) ? tiles.last - 1 - tile : tile - tiles.first;
        const bool is_last = before == tiles.last - tiles.first - 1;
        const int64_t step = Workspace::step(attention, item.query_begin, query, head);
        float* sums = Workspace::grad_q(attention, step, warpgroup);
        int* ticket = Workspace::ticket(attention, step, warpgroup);
        shared.complete[warpgroup] = {item.query_begin + query,
                                      is_last ? min(item.num_queries - query, Config::kStep) : 0,
                                      head, before > 0};
        if (!is_last) ptx::mbarrier_arrive(shared.sums_ready[warpgroup]);
        finish();
        if (before > 0) {
          while (ptx::ld_acquire_gpu(ticket) < before) {
          }
          ptx::fence_proxy_async();
        }
        if (is_last && before > 0) {
          ptx::mbarrier_arrive_expect_tx(shared.sums_ready[warpgroup], kBytes);
          ptx::cp_async_bulk(staged, sums, kBytes, shared.sums_ready[warpgroup]);
        } else if (is_last) {
          ptx::mbarrier_arrive(shared.sums_ready[warpgroup]);
        }
        ptx::mbarrier_wait(shared.sums_full[warpgroup], parity);
        parity ^= 1;
        if (is_last) continue;
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
    finish();
    shared.items.release(place.advance());
  }
}

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

  __device__ __forceinline__ LongBackwardConsumer(const AttentionBackwardParams& params,
                                                  Storage& storage, int own_warpgroup)
      : attention(params),
        shared(storage),
        warpgroup(own_warpgroup),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        scale_log2(static_cast<float>(params.scale) * kLog2E) {}

  // Rows of a tile from `rows` up to `last` become zeros; the caller fences.
  template <typename Tile>
  __device__ __forceinline__ void zero_rows(Tile& tile, int rows, int last) {
#pragma unroll 1
    for (int index = threadIdx.x % 128; index < (last - rows) * Tile::kChunks; index += 128) {
      *reinterpret_cast<uint4*>(tile.chunk(rows + index / Tile::kChunks, index % Tile::kChunks)) =
          make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void finish_zeros() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kZeroedBarrier + warpgroup, 128);
  }

  // Zeros where a query does not see a key.
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

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int e = 0; e < kOutBlocks * 4; ++e) dk[0][e / 4][e % 4] = dv[0][e / 4][e % 4] = 0.0f;
  }

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

  // dQ of this warpgroup's part of a step.
  __device__ __forceinline__ void start_grad_q(Accumulator<1, 8>& dq, const LateStep& late) {
    using Product = ptx::Wgmma<Element, true, true>;
    const int own_columns = Config::kDim == 128 ? warpgroup : 0,
              own_queries = Config::kDim == 64 ? warpgroup : 0;
    ptx::mbarrier_wait(shared.scores_full[late.score_stage], late.score_parity);
    const ptx::MatrixDescriptor grad_scores = shared.sGradScores[late.score_stage].descriptor() +
                                              own_queries * Storage::ScoreRows::kGroupBytes,
                                keys = shared.sK.descriptor() +
                                       own_columns * Storage::KeyRows::kGroupBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kTileN; k += 16)
      Product::run(dq[0], grad_scores + Storage::ScoreRows::row_step_bytes(k),
                   keys + Storage::KeyRows::row_step_bytes(k), k > 0);
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
      const int row = (Config::kDim == 64 ? warpgroup * 64 : 0) + warp * 16;
      sums = row < late.rows
                 ? late.grad_q + row / 16 * LongWorkspace<Config>::kChunk +
                       (Config::kDim == 128 ? warpgroup * LongWorkspace<Config>::kPart : 0)
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
    const int row = (Config::kDim == 64 ? warpgroup * 64 : 0) + warp * 16 + lane / 4,
              column = Config::kDim == 128 ? warpgroup * 64 : 0;
    store_quads(
        dq, scales,
        row_of<Element>(attention.grad_q, int64_t{complete.query_row} + row, complete.head) +
            column,
        attention.grad_q.row_stride, complete.rows - row, attention.dim_qk - column, lane);
  }
  // What is in shared memory of dQ may be added to its sums; behind a fence and a barrier of the warp.
  // The fence is that of the next dS, which saves waiting for another.
  __device__ __forceinline__ void send_grad_q() {
    if (Config::kOrdered && is_staged) ptx::mbarrier_arrive(shared.sums_full[warpgroup]);
    if (!Config::kOrdered && lane == 0 && sums != nullptr) {
      ptx::cp_reduce_async_bulk_add(sums, shared.sGradQ[warpgroup * 4 + warp],
                                    LongWorkspace<Config>::kChunk * 4);
      ptx::cp_async_bulk_commit();
    }
    is_staged = false;
    sums = nullptr;
  }
  __device__ __forceinline__ void send_grad_q_now() {
    ptx::fence_proxy_async();
    __syncwarp();
    send_grad_q();
  }

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
    wgmma_rows_by_rows(s, shared.sK, warpgroup * 64, shared.sQ[stage]);
    ptx::wgmma_commit_group();
    read_step();
    load_first_chunks(lse, 0);
  }
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
  // dP^T = V dO^T
  __device__ __forceinline__ void start_grad_probs(Accumulator<1, kScoreBlocks>& dp) {
    ptx::wgmma_fence();
    wgmma_rows_by_rows(dp, shared.sV, warpgroup * 64, shared.sGradOut[stage]);
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
  // A step before which no product is in flight.
  __device__ __forceinline__ void run_scores(Packed& p, Packed& ds, const KeyItem& item) {
    wait_for_step();
    Accumulator<1, kScoreBlocks> s, dp;
    start_scores(s);
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
    wgmma_packed_by_columns(dv, p, shared.sGradOut[stage]);
    const LateStep late = publish_grad_scores();
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, shared.sQ[stage]);
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
    run_scores(p, ds, item);
    if (!flags.is_last()) {
      late = start_sums(p, ds);
      ptx::wgmma_wait_group<0>();
      finish_sums();
      run_scores(p, ds, item);
      while (!flags.is_last()) {
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
    ptx::wgmma_wait_group<0>();
    finish_sums();
    stage_grad_q(dq, late);
    send_grad_q_now();
  }

  __device__ __forceinline__ void store_item(const KeyItem& item) {
    const float scale = static_cast<float>(attention.scale);
    const float scales[2] = {scale, scale}, ones[2] = {1.0f, 1.0f};
    const int own_row = warpgroup * 64 + warp * 16 + lane / 4, rows = item.keys - own_row;
    const int64_t global_row = static_cast<int64_t>(item.key_begin) + own_row;
    store_quads(dk, scales, row_of<Element>(attention.grad_k, global_row, item.kv_head),
                attention.grad_k.row_stride, rows, attention.dim_qk, lane);
    store_quads(dv, ones, row_of<Element>(attention.grad_v, global_row, item.kv_head),
                attention.grad_v.row_stride, rows, attention.dim_v, lane);
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      shared.items.wait(place);
      const int stage = place.advance();
      const KeyItem& item = shared.item[stage];
      if (item.is_end) break;
      reset();
      const StepRange<kStep> range(item, queries_window(attention, item));
      if (range.count > 0) {
        flags = {item.first_step};
        ptx::mbarrier_wait(shared.keys_full, keys_parity);
        keys_parity ^= 1;
        const int first = max(item.keys, warpgroup * 64), last = warpgroup * 64 + 64;
        if (first < last) {
          zero_rows(shared.sK, first, last);
          zero_rows(shared.sV, first, last);
          finish_zeros();
        }
        run_steps(item);
        if (lane == 0) ptx::mbarrier_arrive(shared.keys_empty);
      }
      store_item(item);
      shared.items.release(stage);
    }
    if (!Config::kOrdered && lane == 0) ptx::cp_async_bulk_wait();
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void long_backward(
    const __grid_constant__ LongBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<LongBackwardStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    ptx::prefetch_tensormap(params.grad_out);
    // Every lane arrives for what it has read, as racecheck follows it.
    shared.items.init(kConsumerWarps * 32 + 1 + (Config::kOrdered ? Config::kWarpgroups : 0));
    shared.ring.init(kConsumerWarps * 32);
    ptx::mbarrier_init(shared.keys_full, 1);
    ptx::mbarrier_init(shared.keys_empty, kConsumerWarps);
    ptx::mbarrier_init(shared.wanted, 1);
    for (int i = 0; i < Config::kWarpgroups; ++i) {
      ptx::mbarrier_init(shared.sums_full[i], 4 * 32);
      ptx::mbarrier_init(shared.sums_ready[i], 1);
    }
    for (int i = 0; i < Config::kScoreStages; ++i) {
      ptx::mbarrier_init(shared.scores_full[i], kConsumerWarps);
      ptx::mbarrier_init(shared.scores_empty[i], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  __syncthreads();
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) schedule_keys<Config>(params, shared);
    if (threadIdx.x == 32) copy_steps<Config>(params, shared);
    if (Config::kOrdered && (threadIdx.x == 64 || threadIdx.x == 96))
      send_sums<Config>(params, shared, static_cast<int>(threadIdx.x) / 32 - 2);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    LongBackwardConsumer<Config>(params.attention, shared, warpgroup - 1).run();
  }
}

template <typename Config>
cudaError_t launch_long_backward(const AttentionBackwardParams& attention, cudaStream_t stream) {
  using Storage = LongBackwardStorage<Config>;
  LongBackwardParams params;
  params.attention = attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  int device = 0, num_sms = 0;
  const cudaError_t errors[] = {
      encode_heads<typename Storage::QueryRows>(params.q, attention, attention.q, queries,
                                                attention.heads, attention.dim_qk),
      encode_heads<typename Storage::QueryRows>(params.grad_out, attention, attention.grad_out,
                                                queries, attention.heads, attention.dim_v),
      encode_heads<typename Storage::KeyRows>(params.k, attention, attention.k, keys,
                                              attention.kv_heads, attention.dim_qk),
      encode_heads<typename Storage::KeyRows>(params.v, attention, attention.v, keys,
                                              attention.kv_heads, attention.dim_v),
      cudaGetDevice(&device),
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  // Several CTAs per SM, but no more, since often there is nothing to do.
  const int64_t tiles = num_longer_tiles(queries, kPreparedRows),
                slots = 8 * num_sms / attention.heads + 1;
  const Grid rows{tiles < slots ? tiles : slots, attention.heads};
  cudaError_t error = launch_dependent<plan_long<Config::kTileN, AttentionBackwardParams>>(
      attention, Grid{1}, kPlanThreads, 0, stream);
  if (error != cudaSuccess) return error;
  error = launch_dependent<prepare_long<Config>>(attention, rows, kPrepareThreads, 0, stream);
  if (error != cudaSuccess) return error;
  const int64_t items =
      num_tiles(keys, attention.kv_offsets.num_seqs, Config::kTileN) * attention.kv_heads;
  error = launch_dependent<long_backward<Config>>(params, Grid{items < num_sms ? items : num_sms},
                                                  Config::kThreads, sizeof(Storage), stream,
                                                  Config::kName);
  if (error != cudaSuccess || Config::kOrdered) return error;
  return launch_dependent<finish_long<Config>>(attention, rows, kPrepareThreads, 0, stream);
}

template <typename Element, int kDim>
cudaError_t launch_long_backward_of(const AttentionBackwardParams& params, cudaStream_t stream) {
  return params.long_tickets != nullptr
             ? launch_long_backward<LongBackwardConfig<Element, kDim, true>>(params, stream)
             : launch_long_backward<LongBackwardConfig<Element, kDim, false>>(params, stream);
}

template <typename Element>
cudaError_t launch_backward_long(const AttentionBackwardParams& params, cudaStream_t stream) {
  return dim_bucket(params) == 64 ? launch_long_backward_of<Element, 64>(params, stream)
                                  : launch_long_backward_of<Element, 128>(params, stream);
}

}  // namespace jagged_cuda::attention
