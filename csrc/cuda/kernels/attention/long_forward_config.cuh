// What the forward kernel for long sequences (long_forward.cuh) is made of for a head dim: tiles, registers,
// components, and what they need of shared memory.
#pragma once

#include "cuda/kernels/attention/long_items.cuh"
#include "cuda/kernels/attention/softmax_score.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/attention/window_mask.cuh"

namespace jagged_cuda::attention {

// Where tiles of V serve as they come.
struct PlainValues {
  struct Shared {};
  static constexpr int kWarps = 0;  // of producers that prepare them
  template <typename KeyRows>
  using Rows = KeyRows;
};

// Where nothing is added to scores.
struct NoBias {
  struct Shared {
    __device__ __forceinline__ static void init() {}
  };
  static constexpr int kWarps = 0;       // that bring it
  static constexpr int kFillers = 0;     // of them, those that do so with K and V
  static constexpr int kSteps = 1;       // of keys that are kept
  static constexpr bool kAhead = false;  // whether it is loaded as soon as scores are done with
};

template <typename Config>
struct LongForwardConsumer;  // long_forward_consumer.cuh

template <typename Element_, int kDim_, bool kPacked_ = false>
struct LongForwardConfig {
  template <typename Config>
  using Consumer = LongForwardConsumer<Config>;
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of products: D and Dv, rounded up
  static constexpr int kTileColumns = kDim == 96 ? 128 : kDim;  // of Q, K, V in shared memory
  // Three need 160 registers each, which hold S, P and O of 64 dims.
  static constexpr int kWarpgroups = kDim == 64 ? 3 : 2;
  static constexpr int kTileM = kWarpgroups * 64;
  // Nothing depends on the batch, so that a row's bits depend on its own sequence alone.
  static constexpr int kTileN = kDim == 256 ? 80 : kDim == 192 ? 112 : 128;
  static constexpr int kSlots = 4;
  // Steps behind the first of an item compute no maximum.
  static constexpr bool kKeepsReference = kDim <= 128;
  // Where there is no room for two items: each warpgroup has a tile of Q for itself.
  static constexpr bool kOwnQueries = kDim > 128;
  // Published ahead. If more than two, their tiles of Q are a ring apart from them.
  static constexpr int kItems = 2;
  static constexpr int kWriters = 0;  // warpgroups that write biases
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  // Together with the producers' all that kThreads have at the start.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  // Tiles hold 2^packed_shift heads of each query.
  static constexpr bool kPacked = kPacked_;
  using Mask = WindowMask<kTileN, kPacked>;
  using Score = SoftmaxScore;
  using Bias = NoBias;
  using Values = PlainValues;
  static constexpr PathName kName =
      PathName("cuda.attention.forward.long.") + (kPacked ? "packed.d" : "d") + kDim;
  static_assert(kDim == 64 || kDim == 96 || kDim == 128 || kDim == 192 || kDim == 256);
};

struct LongForwardParams {
  CUtensorMap q;    // boxes of QueryRows::kRows rows of one head
  CUtensorMap k;    // boxes of kTileN rows
  CUtensorMap v;    // the same, or what Config::Values says
  CUtensorMap out;  // boxes of kStoredRows rows, where kStoresThroughQueries
  AttentionParams attention;
};

template <typename Config>
struct LongForwardStorage {
  using Element = typename Config::Element;
  static constexpr int kItems = Config::kItems, kConsumerWarps = Config::kWarpgroups * 4;
  // One per stage of item, or per warpgroup, or a ring.
  static constexpr int kQueryTiles = 2;
  static constexpr bool kQueryRing = kItems > kQueryTiles;
  static_assert(!(kQueryRing && Config::kOwnQueries));
  // Whether the output of an item leaves through its tile of Q, which nobody has asked for then.
  static constexpr bool kStoresThroughQueries = !kQueryRing && !Config::kOwnQueries;
  using QueryRows =
      WarpgroupTile<Element, Config::kOwnQueries ? 64 : Config::kTileM, Config::kTileColumns>;
  using KeyRows = WarpgroupTile<Element, Config::kTileN, Config::kTileColumns>;
  using ValueRows = typename Config::Values::template Rows<KeyRows>;  // as they are copied
  QueryRows sQ[kQueryTiles];
  KeyRows slots[Config::kSlots];
  Ring<kItems> items;  // of item, and of sQ if neither kOwnQueries nor kQueryRing
  uint64_t q_full[kQueryTiles], q_empty[kQueryTiles];
  Ring<Config::kSlots> ring;  // of slots
  WorkItem item[kItems];
  // Where masks are to be prepared, items wait for it.
  Ring<kItems> planned;
  WorkItem planned_item[kItems];
  typename Config::Mask::Shared keys[kItems];
  typename Config::Bias::Shared bias;
  typename Config::Values::Shared values;

  // One thread, before all others are let go on.
  __device__ __forceinline__ void init() {
    items.init((kConsumerWarps + Config::Bias::kWarps + Config::Values::kWarps) * 32 + 1,
               Config::Mask::kPrepared ? 32 : 1);
    if constexpr (Config::Values::kWarps > 0) values.init();
    ring.init(kConsumerWarps, 1 + Config::Bias::kFillers * 32);
    bias.init();
    if constexpr (Config::Mask::kPrepared) planned.init(32);
    for (uint64_t& barrier : q_full) ptx::mbarrier_init(barrier, 1);
    for (uint64_t& barrier : q_empty)
      ptx::mbarrier_init(barrier, Config::kOwnQueries ? 4 : kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace jagged_cuda::attention
