// Forward of jagged_flash_attention for long sequences on wgmma and TMA (compute capability 9.0),
// 16-bit elements. For a tile of queries of one sequence and head, over tiles j of its keys, with
// c = |scale| log2(e) and a reference m that seldom moves (LazySoftmax):
//     S_j = Q K_j^T,  P_j = exp2(c (S_j - m)),  l = l r + rowsum P_j,  O = O r + P_j V_j
// where r = exp2(c (m before - m)), and at the end out = O / l, lse = scale m + ln l. Up to 128 dims
// a step computes no maximum: where the sums show that m has fallen behind, S is computed once more
// from K_j, which stays in its slot until then, and m moves. At 128 dims that holds for the first step,
// too, whose m is the maximum over some keys.
//
// Grid: one CTA per SM, which takes items (tile of kTileM queries, head) from a plan that lists long
// sequences first (long_plan.cuh), until there are no more. A CTA has a warpgroup of producers and
// kWarpgroups that compute 64 rows each:
//
//     scheduler (one warp)     copier (one thread)          each computing warpgroup
//     for each item:           for each item:               for each item:
//       take it, publish it      Q, K_0                       for each key tile j:
//                                for each key tile j:           take the turn
//                                  K_{j+1}, V_j                 start S = Q K_j^T
//                                                               start O += P_{j-1} V_{j-1}
//                                                               pass the turn
//                                                               P_j = softmax step of S
//
// The product with the last P of an item is started together with the first S of the next item,
// behind which the output of the item is stored: the tensor cores do not wait between items. It leaves
// through the item's tile of Q, as bulk copies that run beside the next item; rows of a warp that has
// fewer than 16 are copied by its lanes. Above
// 128 dims there is no room for a second Q (kOwnQueries): each warpgroup has a tile of Q for itself,
// which is filled anew as soon as it has computed its last S of an item, and the last product and
// the output of an item come before the next Q. There a warpgroup also passes over the key tiles at
// the end of an item that its rows do not see. Only one warpgroup at a time hands products to the tensor cores, while the others are at their
// exponentials: a warp that starts a product waits until those before it are done.
//
// Components of a Config: its Mask (which keys a row sees), Score (what becomes of a score: here
// softmax) and Bias (what is added to one). With ranges of keys and the like they are those of
// ranged_forward.cuh: then a third warp of producers, behind the scheduler, finds what the rows of an
// item see (prepare_masks), a fourth one brings biases, or times, from which warpgroups behind the
// computing ones write them (starting_times.cuh), steps that no row sees are passed over, and items are
// published further ahead than there are tiles of Q (kQueryRing).
//
// Registers: setmaxnreg moves them from the producers to the others. A product that accumulates
// reads and writes its accumulators in the register file, which slows all other instructions of the
// SM down by about 1.6: so what counts is how few there are between two turns.
//
// Where kv heads serve several heads, a tile holds 2^packed_shift of these of each query (kPacked), query
// by query: a row of the tile is a head of a query, and boxes of Q and of the output hold as many heads.
//
// Shared memory, in rows of 2 kTileColumns bytes: Q kTileM rows, twice (above 128 dims once); kSlots
// tiles of kTileN rows, through which K and V pass in the order above. 112, 192, 192, 216, 224 KiB for
// kDim 64, 96, 128, 192, 256: products of 96 columns leave out a quarter of tiles of 128.
//
// Barriers:           arrives                              waits
//     items.full      scheduler, or prepare_masks          copier, computing warps
//     items.empty     copier, computing warps              the same; then sQ is free as well
//     planned         scheduler, prepare_masks             prepare_masks, scheduler
//     q_full          copier, with the bytes of Q          computing warps
//     q_empty[w]      warpgroup w, after its last S        copier (kOwnQueries)
//     q_empty[stage]  computing warps, after their last S  copier (kQueryRing)
//     ring.full       copier, with the bytes of a tile     computing warps
//                     and what brings biases
//     ring.empty      computing warps, after its product   copier
//     turn[w]         warpgroup w - 1, modulo their number warpgroup w, before it starts products
//     zeroed[w]       warpgroup w                          the same, after it has written zeros
//     vote[w]         warpgroup w                          the same: whether some m has fallen behind
// All warpgroups take equally many turns, those without rows in a tile too: one per key tile, one
// per item without keys and one at the end.
//
// A copy may reach into the next sequence. Of K that gives scores that are masked; rows of V past
// the end are overwritten with zeros, since 0 times NaN is NaN; rows of Q give rows that are not
// stored. A sequence of length 0 is not planned; one without keys gives out 0, lse -inf, and so do
// rows outside all sequences, where the plan has them.
#pragma once

#include "cuda/kernels/attention/bias.cuh"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_plan.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/store_tile.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

// What a window and the lengths hide of an item, of which a warpgroup computes the 64 rows from
// `first_row` on. What few steps need, those that are cut, is read again from `tile`, which lies in
// shared memory: registers are full.
template <int kTileN, bool kPacked>
class WindowMask {
 public:
  // Of an item, found by the scheduler: the keys that the tile walks over; those that are not cut for
  // the first warpgroup's rows begin at `uncut`, and its first row sees none from `unseen` on.
  struct alignas(16) Shared {
    int first;
    int last;
    int uncut;
    int unseen;
  };
  static constexpr bool kPrepared = false;   // Shared, by another warp of producers
  static constexpr bool kEndsEarly = false;  // for a warpgroup, at the last key that its rows see

  __device__ __forceinline__ static Shared find(const AttentionParams& params,
                                                const QueryTile& packed) {
    QueryTile tile = packed;
    tile.row >>= params.packed_shift;
    tile.rows >>= params.packed_shift;
    const WindowOf<int> window = window_of(params, tile);
    const KeyRange keys(tile, window, kTileN);
    const int first = tile.row + window.diagonal;
    return {keys.first, keys.last, first + (63 >> params.packed_shift) - window.before,
            first + window.after + 1};
  }

  __device__ __forceinline__ WindowMask(const AttentionParams& params, const QueryTile& tile,
                                        const Shared& shared, int first_row = 0)
      : params_(params),
        tile_(tile),
        found_(shared),
        first_uncut_(found_.uncut + query_of(first_row)),
        last_uncut_(min(found_.unseen + query_of(first_row), tile.num_keys) - kTileN) {}

  // The steps of keys: from first() on next(), before last().
  __device__ __forceinline__ int first() const { return found_.first; }
  __device__ __forceinline__ int next(int key) const { return key + kTileN; }
  __device__ __forceinline__ int last() const { return found_.last; }
  // Behind the last key that a warpgroup's rows see, at least first() + 1.
  __device__ __forceinline__ int own_last(int warpgroup) const {
    return own_last_key(tile_, window(), KeyRange(tile_, window(), kTileN), warpgroup * 64);
  }
  __device__ __forceinline__ bool cuts(int key) const {
    return key < first_uncut_ || key > last_uncut_;
  }
  // Whether all is seen of a step, as far as that is known before its scores are there.
  __device__ __forceinline__ bool is_uncut(int, int) const { return false; }
  // Scores of keys from `key` on that this lane's rows, of which own_row() is the first, do not see
  // become `value`.
  template <int kBlocks, typename OwnRow>
  __device__ __forceinline__ void hide(Accumulator<1, kBlocks>& s, float value, bool, int key,
                                       int warpgroup, OwnRow own_row, int lane) const {
    if (!cuts(key)) return;
    const WindowOf<int> seen = window();
    const int row = tile_.row + own_row();
    const int rows[2] = {query_of(row), query_of(row + 8)};
    if (seen.first_column(query_of(tile_.row + warpgroup * 64 + 63)) > key) {
      replace_unseen(s[0], value, seen, rows, key, tile_.num_keys, lane);
    } else {
      replace_behind(s[0], value, seen, rows, key, tile_.num_keys, lane);
    }
  }

 private:
  __device__ __forceinline__ WindowOf<int> window() const { return window_of(params_, tile_); }
  __device__ __forceinline__ int query_of(int row) const {
    return kPacked ? row >> params_.packed_shift : row;
  }

  const AttentionParams& params_;
  const QueryTile& tile_;
  const Shared found_;
  const int first_uncut_;  // first keys of steps that are not cut
  const int last_uncut_;
};

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

// Scores of a warp's 16 rows as softmax has them.
struct SoftmaxScore {
  static constexpr float kHidden = -INFINITY;
  const float scale, scale_log2;
  LazySoftmax softmax;
  float rescale[1][2], sums[2];

  // The scale is at least a tiny positive number: with scale 0 all scores are equal, but a masked
  // one, -inf, must stay so.
  __device__ __forceinline__ explicit SoftmaxScore(const AttentionParams& params)
      : scale(static_cast<float>(params.scale)), scale_log2(fmaxf(fabsf(scale) * kLog2E, 1e-30f)) {}

  __device__ __forceinline__ void reset() { softmax = LazySoftmax(); }
  // Before what is hidden is replaced.
  template <int kBlocks>
  __device__ __forceinline__ void begin(Accumulator<1, kBlocks>& s) const {
    if (scale >= 0.0f) return;
    // The maximum of scale * S lies where -S is largest.
#pragma unroll
    for (int e = 0; e < kBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
  }
  // Scores become the operand of the product with V, written after finish_output(). True where what
  // was summed so far is to be multiplied by `rescale`.
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(Accumulator<1, kBlocks>& s, Probs& p,
                                         FinishOutput finish_output) {
    return softmax.update(s, p, rescale, scale_log2, finish_output);
  }
  // The same without a maximum: whether it has to be done with one, by move() from the same scores;
  // else keep(). Rows from `rows` on, of which `row` and the eighth behind it are this lane's, never
  // have to, once they are held.
  __device__ __forceinline__ void hold_rows(int row, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= rows) softmax.reference[half] = INFINITY;
    }
  }
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool try_keeping(const Accumulator<1, kBlocks>& s, Probs& p,
                                              FinishOutput finish_output) {
    softmax.try_keeping(s, p, sums, scale_log2, finish_output);
    return softmax.is_behind(sums[0]) || softmax.is_behind(sums[1]);
  }
  __device__ __forceinline__ void keep() { softmax.keep(sums); }
  // The same for the first step, relative to references that are only guessed from the first keys,
  // unless some of the step are hidden (`is_cut`).
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool try_guessing(const Accumulator<1, kBlocks>& s, Probs& p,
                                               bool is_cut, int row, int rows,
                                               FinishOutput finish_output) {
    constexpr int kGuessedBlocks = 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[0][0][2 * half];
#pragma unroll
      for (int i = 1; i < 2 * kGuessedBlocks; ++i) top = fmaxf(top, s[0][i / 2][2 * half + i % 2]);
      softmax.reference[half] = is_cut ? LazySoftmax::maximum(s, half) : quad_max(top);
    }
    hold_rows(row, rows);
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // While a row has seen nothing, -inf - -inf would be NaN.
      shift[half] =
          softmax.reference[half] == -INFINITY ? 0.0f : softmax.reference[half] * scale_log2;
    }
    finish_output();
    LazySoftmax::exponentials(s, p, sums, shift, scale_log2);
    return softmax.is_behind(sums[0]) || softmax.is_behind(sums[1]);
  }
  template <typename Probs, int kBlocks>
  __device__ __forceinline__ void move(const Accumulator<1, kBlocks>& s, Probs& p) {
    const bool behind[2] = {softmax.is_behind(sums[0]), softmax.is_behind(sums[1])};
    softmax.move(s, p, rescale, behind, scale_log2);
  }
  // The factors of the rows' sums, of which this lane has two: row global_row of q, `rows` of which
  // exist from there on, and the eighth behind it, 8 >> packed_shift rows of q further.
  __device__ __forceinline__ void finish(float (&factor)[2], const AttentionParams& params,
                                         int64_t global_row, int rows, int head, int, int lane,
                                         int packed_shift) {
    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[half];
      factor[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && half * 8 < rows) {
        static_cast<float*>(
            params.lse)[(global_row + half * (8 >> packed_shift)) * params.heads + head] =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
  }
};

template <typename Element_, int kDim_, bool kPacked_ = false>
struct LongForwardConfig {
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

struct WorkItem {
  QueryTile tile;
  int head;
  bool is_end;  // there are no more
};

template <typename Config>
struct LongForwardStorage {
  using Element = typename Config::Element;
  static constexpr int kItems = Config::kItems;
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
    const unsigned fastest = descending ? heads : tiles, place = static_cast<unsigned>(index);
    const int slow = static_cast<int>(place / fastest), fast = static_cast<int>(place % fastest);
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

// The same where masks are to be prepared (prepare_masks): items go to another ring first. Many items
// ahead hide how long it takes to find short ones; of long ones a CTA takes but one ahead, so that all
// CTAs end together.
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

// Finds what is to be known of the items' masks, behind the scheduler; one warp.
template <typename Config, typename Storage>
__device__ __forceinline__ void prepare_masks(const AttentionParams& attention, Storage& shared) {
  RingPosition<Storage::kItems> from, to;
  for (;;) {
    shared.planned.wait(from);
    const WorkItem item = shared.planned_item[from.stage];
    shared.planned.release(from.advance());
    shared.items.acquire(to);
    if (!item.is_end) Config::Mask::prepare(shared.keys[to.stage], attention, item.tile);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      shared.item[to.stage] = item;
      ptx::mbarrier_arrive(shared.items.full[to.stage]);
    }
    __syncwarp();
    to.advance();
    if (item.is_end) return;
  }
}

// Copies Q, K and V of the items, in the order of their use; one thread.
template <typename Config>
__device__ __forceinline__ void copy_operands(const LongForwardParams& params,
                                              LongForwardStorage<Config>& shared) {
  const AttentionParams& attention = params.attention;
  const int group = attention.heads / attention.kv_heads;
  RingPosition<LongForwardStorage<Config>::kItems> place;
  RingPosition<Config::kSlots> slot;
  unsigned q_parities = ~0u;  // one bit per warpgroup
  RingPosition<LongForwardStorage<Config>::kQueryTiles> queries;
  for (;;) {
    shared.items.wait(place);
    const WorkItem item = shared.item[place.stage];
    const typename Config::Mask mask(attention, item.tile, shared.keys[place.stage]);
    const int stage = place.advance();
    // What is prepared of a mask is looked at until the last copy.
    const bool has_keys = mask.first() < mask.last();
    if (!Config::Mask::kPrepared || !has_keys) shared.items.release(stage);
    if (item.is_end) return;
    if (!has_keys) continue;
    const auto copy = [&](const CUtensorMap& map, int key) {
      shared.ring.acquire(slot);
      copy_tile(shared.slots[slot.stage], map, item.tile.key_begin + key, item.head / group,
                shared.ring.full[slot.stage]);
      slot.advance();
    };
    if constexpr (LongForwardStorage<Config>::kQueryRing)
      ptx::mbarrier_wait(shared.q_empty[queries.stage], queries.parity ^ 1);
    if constexpr (!Config::kOwnQueries) {
      const int tile = LongForwardStorage<Config>::kQueryRing ? queries.advance() : stage;
      copy_tile(shared.sQ[tile], params.q, item.tile.global_row, item.head, shared.q_full[tile]);
    }
    copy(params.k, mask.first());
    if constexpr (Config::kOwnQueries) {
      for (int w = 0; w < Config::kWarpgroups && w * 64 < item.tile.rows; ++w) {
        ptx::mbarrier_wait(shared.q_empty[w], q_parities >> w & 1);
        q_parities ^= 1u << w;
        copy_tile(shared.sQ[w], params.q, item.tile.global_row + w * 64, item.head,
                  shared.q_full[w]);
      }
    }
    for (int key = mask.first(), next; key < mask.last(); key = next) {
      next = mask.next(key);
      if (next < mask.last()) copy(params.k, next);
      if constexpr (Config::Values::kWarps > 0) {
        shared.values.copy(params.v, item.tile.key_begin + key, item.head / group);
        slot.advance();
      } else {
        copy(params.v, key);
      }
    }
    if (Config::Mask::kPrepared) shared.items.release(stage);
  }
}

// s += a b^T, as wgmma_rows_by_rows.
template <int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void add_rows_by_rows(Accumulator<1, kBlocks>& s, const ATile& a,
                                                 int a_row, const BTile& b) {
  using Product = ptx::Wgmma<typename ATile::Element, false>;
  const ptx::MatrixDescriptor a_rows = a.descriptor(a_row), b_rows = b.descriptor();
#pragma unroll
  for (int k = 0; k < ATile::kColumns; k += 16) {
    Product::run(s[0], a_rows + ATile::column_step_bytes(k), b_rows + BTile::column_step_bytes(k),
                 true);
  }
}

// A warpgroup that computes 64 rows of each item.
template <typename Config>
struct LongForwardConsumer {
  using Element = typename Config::Element;
  using Storage = LongForwardStorage<Config>;
  static constexpr int kTileN = Config::kTileN, kScoreBlocks = kTileN / 8,
                       kOutBlocks = Config::kDim / 8;
  static constexpr int kTurnBarrier = 1, kZeroedBarrier = kTurnBarrier + Config::kWarpgroups,
                       kVoteBarrier = kZeroedBarrier + Config::kWarpgroups;
  static constexpr int kTurnThreads = 256;  // of two warpgroups
  using Mask = typename Config::Mask;
  // Whether a warpgroup leaves out the steps at the end of an item that its rows do not see.
  static constexpr bool kEndsEarly = Config::kOwnQueries || Mask::kEndsEarly;
  static constexpr bool kBiased = Config::Bias::kWarps > 0, kLoadsAhead = Config::Bias::kAhead;
  static_assert(!(kBiased && Config::kKeepsReference));
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
  typename Config::Score score;
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

  // The first of this lane's two rows. Where registers are full it is found anew.
  __device__ __forceinline__ int row_of_thread() const {
    if constexpr (!Config::kKeepsReference) return first_row;
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return warpgroup * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
  }
  __device__ __forceinline__ void take_turn() const {
    ptx::bar_sync(kTurnBarrier + warpgroup, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1;
    ptx::bar_arrive(kTurnBarrier + next, kTurnThreads);
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

  // What is added to the scores of the next step, whose keys are there, divided by their scale: their
  // product starts from it.
  __device__ __forceinline__ void begin_scores() {
    if constexpr (kBiased) {
      wait_for_bias();
      load_bias();
      pass_bias();
    }
  }
  __device__ __forceinline__ void wait_for_bias() { shared.bias.wait(bias_step, row_of_thread()); }
  __device__ __forceinline__ void load_bias() {
    shared.bias.load(s, attention, bias_step, row_of_thread(), lane);
  }
  __device__ __forceinline__ void pass_bias() {
    shared.bias.pass(bias_step, row_of_thread(), lane);
  }
  // The same for the step behind this one, if there is one, while this one's scores are used: where
  // they are loaded, at any rate, so that both stand side by side.
  template <typename UseScores>
  __device__ __forceinline__ void begin_next_scores(bool exists, UseScores use_scores) {
    if constexpr (kLoadsAhead) {
      if (exists) wait_for_bias();
      use_scores();
      load_bias();
      if (exists) pass_bias();
    } else {
      use_scores();
    }
  }
  // S = Q K^T, or what begin_scores() left plus that.
  __device__ __forceinline__ void start_scores(int item_stage, int stage) {
    const auto& sOwn = shared.sQ[query_tile(item_stage)];
    const int row = Config::kOwnQueries ? 0 : warpgroup * 64;
    if constexpr (kBiased) ptx::fence_operands(s[0]);
    ptx::wgmma_fence();
    if constexpr (kBiased) {
      add_rows_by_rows(s, sOwn, row, shared.slots[stage]);
    } else {
      wgmma_rows_by_rows<Config::kDim>(s, sOwn, row, shared.slots[stage]);
    }
    ptx::wgmma_commit_group();
  }
  // Masks of S, the scores of keys from `key` on, when their product is done.
  __device__ __forceinline__ void finish_scores(const Mask& mask, bool is_uncut, int key) {
    ptx::fence_operands(s[0]);
    score.begin(s);
    mask.hide(
        s, Config::Score::kHidden, is_uncut, key, warpgroup, [&] { return row_of_thread(); }, lane);
  }
  // O += P V
  __device__ __forceinline__ void start_output(int stage) {
    ptx::fence_operands(o[0]);
    ptx::wgmma_fence();
    if constexpr (Config::Values::kWarps > 0) {
      wgmma_packed_by_rows(o, p, Config::Values::prepared(shared.slots[stage]));
    } else {
      wgmma_packed_by_columns(o, p, shared.slots[stage]);
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
      constexpr int kChunks = Storage::KeyRows::kChunks;
      if (rows >= kTileN) return;
      for (int index = threadIdx.x % 128; index < (kTileN - rows) * kChunks; index += 128) {
        *reinterpret_cast<uint4*>(shared.slots[stage].chunk(
            rows + index / kChunks, index % kChunks)) = make_uint4(0, 0, 0, 0);
      }
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
  // All warps of the warpgroup have computed their last S of the item.
  __device__ __forceinline__ void store_item(int stage, typename Config::Score& score) {
    const WorkItem& item = shared.item[stage];
    const int own_row = row_of_thread();
    const int rows = item.tile.rows - own_row;  // from this lane's first on
    const int shift = Config::kPacked ? attention.packed_shift : 0;
    const int64_t global_row = item.tile.global_row + (own_row >> shift);
    const int head = item.head + (own_row & ((1 << shift) - 1));
    float factor[2];
    score.finish(factor, attention, global_row, rows, head, item.tile.num_keys, lane, shift);
    if constexpr (Storage::kStoresThroughQueries) {
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
    } else if constexpr (sizeof(Element) == 4) {
      store_pairs(o, factor, row_of<Element>(attention.out, global_row, item.head),
                  attention.out.row_stride, rows, attention.dim_v, lane);
    } else {
      store_quads(o, factor, row_of<Element>(attention.out, global_row, item.head),
                  attention.out.row_stride, rows, attention.dim_v, lane);
    }
  }

  // Instead of a product with keys that this warpgroup does not see.
  __device__ __forceinline__ void skip_scores() {
    release_slot(wait_for_slot());
    if constexpr (kBiased) shared.bias.skip(bias_step);
    take_turn();
    pass_turn();
  }

  // The other warpgroups' work on an item, after its first turn.
  __device__ __forceinline__ void skip_item(int item_stage, const Mask& mask) {
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

  __device__ __forceinline__ void run() {
    bool pending = false;  // the last product of an item before is missing
    int pending_stage = 0, pending_rows = 0;
    if (warpgroup == Config::kWarpgroups - 1) pass_turn();
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
          take_turn();
          start_output(value_slot);
          pass_turn();
          finish_output(value_slot);
          store_item(pending_stage, score);
          release_item(pending_stage);
          pending = false;
        } else {
          take_turn();
          pass_turn();
        }
        if (is_end) return;
        if (has_keys) {
          skip_item(stage, mask);
        } else {
          reset();
          store_item(stage, score);
        }
        release_item(stage);
        continue;
      }

      wait_for_queries(stage);
      int score_slot = wait_for_slot();
      // Behind the last step that this warpgroup computes.
      const int last = kEndsEarly ? mask.own_last(warpgroup) : mask.last();
      int key = mask.first(), next = mask.next(key);
      begin_scores();
      if constexpr (kGuesses) {
        // As a step of the loop below.
        const auto first_step = [&](auto finish_before) {
          ptx::fence_operands(s[0]);
          score.reset();
          finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
          if (ptx::bar_red_or(kVoteBarrier + warpgroup, 128,
                              score.try_guessing(s, p, mask.cuts(key), row_of_thread(), tile.rows,
                                                 finish_before))) {
            start_scores(stage, score_slot);
            ptx::wgmma_wait_group<0>();
            finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
            score.move(s, p);
          } else {
            score.keep();
          }
          release_slot(score_slot);
          if (next >= last) release_queries();
        };
        take_turn();
        if (pending) {
          start_scores(stage, score_slot);
          start_output(value_slot);
          pass_turn();
          ptx::wgmma_wait_group<1>();
          typename Config::Score before = score;
          first_step([&] {
            finish_output(value_slot);
            store_item(pending_stage, before);
          });
          release_item(pending_stage);
        } else {
          start_scores(stage, score_slot);
          pass_turn();
          ptx::wgmma_wait_group<0>();
          first_step([] {});
        }
        clear_output();
      } else {
        if (pending) {
          take_turn();
          start_scores(stage, score_slot);
          start_output(value_slot);
          pass_turn();
          finish_output(value_slot);
          ptx::fence_operands(s[0]);
          store_item(pending_stage, score);
          if constexpr (!Storage::kStoresThroughQueries) release_item(pending_stage);
        } else {
          take_turn();
          start_scores(stage, score_slot);
          pass_turn();
          ptx::wgmma_wait_group<0>();
          ptx::fence_operands(s[0]);
        }
        release_slot(score_slot);
        if (next >= last) release_queries();
        reset();
        finish_scores(mask, mask.is_uncut(row_of_thread() / 16, key), key);
        begin_next_scores(next < last, [&] { score.update(s, p, [] {}); });
        if constexpr (Config::kKeepsReference) score.hold_rows(row_of_thread(), tile.rows);
        if constexpr (Storage::kStoresThroughQueries) {
          if (pending) release_item(pending_stage);  // its copies ran beside this step
        }
      }
      bool is_ready = shared.ring.test(slot);
      while (next < last) {
        key = next;
        if (!is_ready) shared.ring.wait(slot);
        score_slot = slot.advance();
        if constexpr (!kLoadsAhead) begin_scores();
        take_turn();
        start_scores(stage, score_slot);
        value_slot = wait_for_slot();
        start_output(value_slot);
        pass_turn();
        const bool is_uncut = mask.is_uncut(row_of_thread() / 16, key);
        next = mask.next(key);
        ptx::wgmma_wait_group<1>();
        const auto finish_last = [&] {
          finish_output(value_slot);
          is_ready = shared.ring.test(slot);
        };
        if constexpr (Config::kKeepsReference) {
          finish_scores(mask, is_uncut, key);
          if (ptx::bar_red_or(kVoteBarrier + warpgroup, 128,
                              score.try_keeping(s, p, finish_last))) {
            // S once more, from K, which is still there.
            start_scores(stage, score_slot);
            ptx::wgmma_wait_group<0>();
            finish_scores(mask, is_uncut, key);
            score.move(s, p);
            rescale_rows(o, score.rescale);
          } else {
            score.keep();
          }
          release_slot(score_slot);
          if (next >= last) release_queries();
        } else {
          release_slot(score_slot);
          if (next >= last) release_queries();
          finish_scores(mask, is_uncut, key);
          bool moved;
          begin_next_scores(next < last, [&] { moved = score.update(s, p, finish_last); });
          if (moved) rescale_rows(o, score.rescale);
        }
      }
      pending_rows = item.tile.num_keys - key;
      if (Config::kOwnQueries || (kEndsEarly && next < mask.last())) {
        // With its own Q, which is not there yet, the last product does not wait for the next item.
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
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void long_forward(
    const __grid_constant__ LongForwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<LongForwardStorage<Config>*>(wgmma_shared_bytes);
  constexpr int kConsumerWarps = Config::kWarpgroups * 4;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.q);
    ptx::prefetch_tensormap(params.k);
    ptx::prefetch_tensormap(params.v);
    shared.items.init((kConsumerWarps + Config::Bias::kWarps + Config::Values::kWarps) * 32 + 1);
    if constexpr (Config::Values::kWarps > 0) shared.values.init();
    shared.ring.init(kConsumerWarps, 1 + Config::Bias::kFillers);
    shared.bias.init();
    if constexpr (Config::Mask::kPrepared) shared.planned.init(32);
    for (uint64_t& barrier : shared.q_full) ptx::mbarrier_init(barrier, 1);
    for (uint64_t& barrier : shared.q_empty)
      ptx::mbarrier_init(barrier, Config::kOwnQueries ? 4 : kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // The same in all lanes, as the compiler then sees.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  // Of the kernels for shorter sequences, which fill SMs that have no items, or no more.
  ptx::griddepcontrol_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if constexpr (Config::Mask::kPrepared) {
      if (threadIdx.x < 32) schedule_planned<Config>(params.attention, shared);
      if (threadIdx.x / 32 == 2) prepare_masks<Config>(params.attention, shared);
    } else {
      if (threadIdx.x < 32) {
        schedule<Config>(params.attention, shared, [&](int stage, const WorkItem& item) {
          shared.keys[stage] = Config::Mask::find(params.attention, item.tile);
        });
      }
    }
    if (threadIdx.x == 32) copy_operands<Config>(params, shared);
    if constexpr (Config::Values::kWarps > 0) {
      static_assert(Config::Values::kWarps == 2 && Config::Bias::kWarps == 0);
      if (threadIdx.x >= 64) Config::Values::template prepare<Config>(params.attention, shared);
    }
    if constexpr (Config::Bias::kWarps > 0) {
      if (threadIdx.x / 32 == 3) Config::Bias::template copy<Config>(params.attention, shared);
    }
  } else if (Config::kWriters > 0 && warpgroup > Config::kWarpgroups) {
    if constexpr (Config::kWriters > 0) {
      ptx::setmaxnreg_dec<Config::kWriterRegisters>();
      const int first = (Config::kWarpgroups + 1) * 4;
      Config::Bias::template write<Config>(
          params.attention, shared,
          __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 - first, 0));
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    LongForwardConsumer<Config>(params, shared, warpgroup - 1).run();
  }
}

template <typename Config>
cudaError_t launch_long_forward(const AttentionParams& attention, cudaStream_t stream) {
  using Storage = LongForwardStorage<Config>;
  LongForwardParams params;
  params.attention = attention;
  const int shift = attention.packed_shift;
  const cudaError_t errors[] = {encode_heads<typename Storage::QueryRows>(
                                    params.q, attention, attention.q, attention.q_offsets.total,
                                    attention.heads, attention.dim_qk, shift),
                                encode_heads<typename Storage::KeyRows>(
                                    params.k, attention, attention.k, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_qk),
                                encode_heads<typename Storage::ValueRows>(
                                    params.v, attention, attention.v, attention.kv_offsets.total,
                                    attention.kv_heads, attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  if constexpr (Storage::kStoresThroughQueries) {
    const cudaError_t error =
        encode_heads<WarpgroupTile<typename Config::Element, kStoredRows, Config::kTileColumns>>(
            params.out, attention, attention.out, attention.q_offsets.total, attention.heads,
            attention.dim_v, shift);
    if (error != cudaSuccess) return error;
  }
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t items =
      num_tiles(attention.q_offsets.total << shift, attention.q_offsets.num_seqs, Config::kTileM) *
      (attention.heads >> shift);
  const Grid grid{items < num_sms ? items : num_sms};
  if (attention.long_first && attention.plans_itself) {
    return launch<long_forward<Config>>(params, grid, Config::kThreads, sizeof(Storage), stream,
                                        Config::kName);
  }
  if (attention.plans_itself) {
    return launch_planning<long_forward<Config>>(attention, params, grid, Config::kThreads,
                                                 sizeof(Storage), stream, Config::kName);
  }
  return launch_dependent<long_forward<Config>>(params, grid, Config::kThreads, sizeof(Storage),
                                                stream, Config::kName);
}

// Calls launch(LongForwardConfig) for the smallest head dim that holds D and Dv.
template <typename Element, typename Launch>
cudaError_t for_long_forward(const AttentionParams& params, Launch launch) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  if constexpr (sizeof(Element) == 4) {  // tf32_long_forward.cuh
    return dim <= 64 ? launch(LongForwardConfig<Element, 64>())
                     : launch(LongForwardConfig<Element, 128>());
  } else {
    if (params.packed_shift > 0) {
      return dim <= 64 ? launch(LongForwardConfig<Element, 64, true>())
                       : launch(LongForwardConfig<Element, 128, true>());
    }
    if (dim <= 64) return launch(LongForwardConfig<Element, 64>());
    if (dim <= 96) return launch(LongForwardConfig<Element, 96>());
    if (dim <= 128) return launch(LongForwardConfig<Element, 128>());
    if (dim <= 192) return launch(LongForwardConfig<Element, 192>());
    return launch(LongForwardConfig<Element, 256>());
  }
}

template <typename Element>
cudaError_t launch_forward_plan(AttentionParams& params, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return for_long_forward<Element>(params, [&](auto config) {
    constexpr int kTileM = decltype(config)::kTileM;
    params.plans_itself = takes_own_plan(params, params.q_offsets, kTileM >> params.packed_shift,
                                         params.heads >> params.packed_shift, num_sms);
    if (!params.plans_itself) {
      // Those for shorter sequences, which are few then, fill its last round.
      constexpr int64_t kManyRows = int64_t{1} << 18;  // of all heads: some rounds
      const int64_t few_shorter = dim_bucket(params) == 64 ? kShortRows : 1024;
      params.long_first = !is_wide(params) &&
                          params.q_offsets.total >= params.q_offsets.num_seqs * few_shorter &&
                          params.q_offsets.total * params.heads >= kManyRows;
      return launch<plan_long<kTileM, AttentionParams>>(params, Grid{1}, kPlanThreads, 0, stream,
                                                        nullptr);
    }
    const int64_t shorter = long_rows(params) > 0 ? long_rows(params) : 2 * tiny_limit(params);
    params.long_first = params.q_offsets.total >= params.q_offsets.num_seqs * shorter;
    return cudaSuccess;
  });
}

template <typename Element>
cudaError_t launch_forward_long(const AttentionParams& params, cudaStream_t stream) {
  return for_long_forward<Element>(
      params, [&](auto config) { return launch_long_forward<decltype(config)>(params, stream); });
}

}  // namespace jagged_cuda::attention
