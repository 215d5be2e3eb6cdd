// Items and steps of the backward kernel for long sequences (long_backward.cuh): which queries a
// tile of keys meets, in which order, and the shared memory that they pass through.
#pragma once

#include "cuda/kernels/attention/key_items.cuh"
#include "cuda/kernels/attention/long_workspace.cuh"
#include "cuda/kernels/attention/store_tile.cuh"

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
  // dQ is sent behind the fence of the next dS, which saves waiting for its own. At 64 dims there
  // are registers for that only where others send.
  static constexpr bool kSendsLate = kOrdered || kDim == 128;
  static constexpr PathName kName = PathName(kOrdered ? "cuda.attention.backward.long_ordered.d"
                                                      : "cuda.attention.backward.long.d") +
                                    kDim;
  static_assert(kDim == 64 || kDim == 128);
};

struct LongBackwardOperands : BackwardOperands {
  CUtensorMap grad_k;  // [Tk, G, D], boxes of kStoredRows rows of one head
  CUtensorMap grad_v;  // [Tk, G, Dv], likewise
};

// --- items

// How the dQ of an item joins that of others.
enum class JoinsSums : int {
  kAdds,    // to sums that were cleared, or in order
  kStores,  // it is the first
  kWaits,   // it adds to what the first has stored
};

struct KeyItem {
  int query_begin;  // in q
  int first_unit;   // in the workspaces
  int key_begin;    // the tile, in k and v
  int key;          // the tile's first key within the sequence
  int keys;         // of the tile
  int num_queries;
  int num_keys;
  int kv_head;
  int is_end;      // there are no more
  int first_step;  // flags
  JoinsSums joins;
};

// Queries [query, query + kStep) of one head.
struct alignas(16) LongStep {
  float* grad_q;  // its sums, without an order
  int query;
  int next;  // flags of the next step: nothing waits for them when it begins
};

// Where a warpgroup leaves its part of a step's dQ that is complete. Rows are 0 where other tiles
// of keys still add to it.
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
  // Whether its dQ is the first in its sums; the same in all steps of an item, and behind the last.
  __device__ __forceinline__ bool stores() const { return bits >> 17 & 1; }
};

// Steps of an item: for each head of the group all queries that see one of its keys. Without an
// order from some of the first on, so that the CTAs at work do not all add to the same sums.
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

// Which queries a step takes, and its flags; `member` is a head's place in its group, and a step
// behind the last of one head is the first of the next.
template <typename Config>
class StepOrder {
 public:
  __device__ __forceinline__ StepOrder(const AttentionBackwardParams& attention,
                                       const KeyItem& item)
      : window_(queries_window(attention, item)),
        range_(item, window_),
        heads_(attention.heads / attention.kv_heads),
        rises_(!Config::kOrdered || keys_fall(attention)),
        stores_(item.joins == JoinsSums::kStores) {
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
    if (stores_) bits |= 1 << 17;
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
  bool rises_, stores_;
  int start_ = 0;
};

// --- shared memory

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
  alignas(1024) float sGradQ[Config::kWarpgroups * 4]
                            [LongWorkspace<Config>::kChunk];  // a chunk of each warp
  float sStatistics[Config::kStages][2][Config::kStep];       // lse and delta
  CompleteStep complete[Config::kWarpgroups];
  LongStep steps[Config::kStages];
  KeyItem item[kItems];
  Ring<kItems> items;
  Ring<Config::kStages> ring;
  uint64_t keys_full, keys_empty, values_full, values_empty, wanted;
  uint64_t sums_full[Config::kWarpgroups], sums_ready[Config::kWarpgroups];
  uint64_t scores_full[Config::kScoreStages], scores_empty[Config::kScoreStages];

  // The place of a warp's chunk of dQ, for 16 rows of dK.
  using StagedRows = WarpgroupTile<Element, kStoredRows, Config::kDim>;
  static_assert(sizeof(StagedRows) <= sizeof(sGradQ[0]) && sizeof(sGradQ[0]) % 1024 == 0);
  __device__ __forceinline__ StagedRows& staged_rows(int index) {
    return *reinterpret_cast<StagedRows*>(sGradQ[index]);
  }
};
static_assert(sizeof(LongBackwardStorage<LongBackwardConfig<__half, 64, true>>) <= 227 * 1024);
static_assert(sizeof(LongBackwardStorage<LongBackwardConfig<__half, 128, true>>) <= 227 * 1024);

}  // namespace jagged_cuda::attention
