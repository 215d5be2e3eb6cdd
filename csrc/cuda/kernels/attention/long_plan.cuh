// Which sequences the kernel for long ones takes, longest first, so that the last items of a
// persistent kernel are short ones. Where it takes all, and forward with ranges of keys and the like
// (launch_forward_general), the rows outside all sequences come last, as sequences without keys (in
// the backward pass for dk and dv: without queries). One CTA sorts sequences by counting into
// kPlanBins bins of their numbers of keys; the order within a bin is not fixed, and no result depends
// on it.
//
// A kernel before the main one costs some microseconds, so where there are few sequences and items
// (takes_own_plan) each CTA finds the order itself: a lane of the warp that takes items holds a sequence, and
// adds up the tiles of those that come before it.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

struct PlannedSequence {
  int first_tile;  // tiles of all that come before in the plan
  int begin;       // its rows in q
  int num_queries;
  int seq;  // -1 for rows outside all sequences
};

struct LongPlan {
  unsigned long long next_item;  // items handed out so far
  int num_sequences;
  int num_tiles;
  PlannedSequence sequences[1];  // [B + 2]
};
static_assert(sizeof(LongPlan) <= 32 && sizeof(PlannedSequence) == 16, "long_plan_bytes");

constexpr int kPlanThreads = 1024, kPlanBins = 64;

// Three bits of mantissa: bins are at most an eighth wide.
__device__ __forceinline__ int plan_bin(int num_keys) {
  const int blocks = num_keys / 64;
  if (blocks < 8) return kPlanBins - 1 - blocks;
  const int exponent = 31 - __clz(blocks);
  return max(0, kPlanBins - 1 - ((exponent - 2) * 8 + (blocks >> (exponent - 3) & 7)));
}

__device__ __forceinline__ int keys_of(const AttentionParams& attention, int64_t seq,
                                       int64_t num_queries) {
  return static_cast<int>(attention.kv_offsets.data == attention.q_offsets.data
                              ? num_queries
                              : sequence_rows(attention.kv_offsets, seq).len);
}

// The keys of a planned sequence.
__device__ __forceinline__ RowRange planned_keys(const AttentionParams& attention,
                                                 const PlannedSequence& sequence) {
  if (sequence.seq < 0) return {0, 0};
  if (attention.kv_offsets.data == attention.q_offsets.data)
    return {sequence.begin, sequence.num_queries};
  return sequence_rows(attention.kv_offsets, sequence.seq);
}

// This thread's place among those that count in the same bin. All lanes of a warp.
__device__ __forceinline__ int take_place(int* counts, int bin) {
  const unsigned peers = __match_any_sync(__activemask(), bin);
  const int lane = threadIdx.x % 32, leader = __ffs(static_cast<int>(peers)) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(&counts[bin], __popc(peers));
  return __shfl_sync(peers, first, leader) + __popc(peers & ((1u << lane) - 1));
}

// The keys of a sequence that the kernel takes, -1 for others.
__device__ __forceinline__ int planned_length(const AttentionParams& attention, int64_t seq,
                                              int64_t num_queries) {
  const PlannedLengths& planned = attention.planned;
  const int num_keys = keys_of(attention, seq, num_queries);
  const bool is_spared = num_queries <= planned.spared && num_keys <= planned.spared;
  return num_queries > planned.above && !is_spared ? num_keys : -1;
}

// Items are tiles of kTile queries, in the backward pass of keys.
template <int kTile, typename Params>
__global__ __launch_bounds__(kPlanThreads) void plan_long(
    const __grid_constant__ Params attention) {
  constexpr bool kOfKeys = std::is_same_v<Params, AttentionBackwardParams>;
  __shared__ int counts[kPlanBins];
  __shared__ int warp_tiles[32];
  __shared__ unsigned long long all_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t num_seqs = attention.q_offsets.num_seqs;
  LongPlan& plan = *static_cast<LongPlan*>(attention.long_plan);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < kPlanBins) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) all_tiles = 0;
  __syncthreads();

  const auto bin_of = [&](int64_t seq) {
    if (seq >= num_seqs) return -1;
    const int length = planned_length(attention, seq, sequence_rows(attention.q_offsets, seq).len);
    return length < 0 ? -1 : plan_bin(length);
  };
  constexpr int kAhead = 8;  // loads in flight
  for (int64_t first = threadIdx.x; first < num_seqs; first += kAhead * kPlanThreads) {
    int bins[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) bins[i] = bin_of(first + i * kPlanThreads);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (bins[i] >= 0) take_place(counts, bins[i]);
    }
  }
  __syncthreads();
  if (warp == 0) {  // exclusive sums
    const int low = counts[2 * lane], both = low + counts[2 * lane + 1];
    int sum = both;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    counts[2 * lane] = sum - both;
    counts[2 * lane + 1] = sum - both + low;
    if (lane == 31) plan.num_sequences = sum;
  }
  __syncthreads();
  const int num_sequences = plan.num_sequences;
  for (int64_t seq = threadIdx.x; seq < num_seqs && num_sequences > 0; seq += kPlanThreads) {
    const int bin = bin_of(seq);
    if (bin < 0) continue;
    const RowRange rows = sequence_rows(attention.q_offsets, seq);
    plan.sequences[take_place(counts, bin)] = {0, static_cast<int>(rows.begin),
                                               static_cast<int>(rows.len), static_cast<int>(seq)};
  }
  __syncthreads();
  int tiles_before = 0;
  for (int first = 0; first < num_sequences; first += kPlanThreads) {
    const int rank = first + static_cast<int>(threadIdx.x);
    int tiles = 0;
    if (rank < num_sequences) {
      const PlannedSequence& sequence = plan.sequences[rank];
      const int rows = kOfKeys ? keys_of(attention, sequence.seq, sequence.num_queries)
                               : sequence.num_queries << attention.packed_shift;
      tiles = (rows + kTile - 1) / kTile;
    }
    if (kOfKeys) {
      // Of 32 numbers below 2^31 the sum in two halves.
      const auto low = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(tiles) & 0xffff),
                 high = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(tiles) >> 16);
      if (lane == 0) atomicAdd(&all_tiles, (static_cast<unsigned long long>(high) << 16) + low);
    }
    int sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) warp_tiles[warp] = sum;
    __syncthreads();
    int warps_sum = warp_tiles[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, warps_sum, step);
      if (lane >= step) warps_sum += before;
    }
    const int warps_before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, warps_sum, warp - 1);
    if (rank < num_sequences)
      plan.sequences[rank].first_tile = tiles_before + warps_before + sum - tiles;
    tiles_before += __shfl_sync(0xffffffffu, warps_sum, 31);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    if (attention.planned.outside) {
      const OffsetsView& offsets = kOfKeys ? attention.kv_offsets : attention.q_offsets;
      const int begin = static_cast<int>(clamped_offset(offsets, 0)),
                end = static_cast<int>(clamped_offset(offsets, num_seqs)),
                total = static_cast<int>(offsets.total);
      plan.sequences[num_sequences] = {tiles_before, 0, begin, -1};
      tiles_before += (begin + kTile - 1) / kTile;
      plan.sequences[num_sequences + 1] = {tiles_before, end, total - end, -1};
      tiles_before += (total - end + kTile - 1) / kTile;
      plan.num_sequences = num_sequences + 2;
    }
    plan.num_tiles = tiles_before;
    plan.next_item = 0;
    // Wrong offsets make more tiles than there can be, and first tiles that overflow. Items that wait
    // for others (long_backward.cuh) would then wait for some that nobody takes.
    if (kOfKeys && all_tiles > attention.kv_offsets.total / kTile + num_seqs)
      plan.num_sequences = plan.num_tiles = 0;
  }
  // So that this kernel does not end before that which it runs beside.
  ptx::griddepcontrol_wait();
}

// Compiled once for all kernels with a plan, in long_plan.cu.
template <int kTile, typename Params>
cudaError_t launch_plan(bool is_behind, Params params, cudaStream_t stream);

// Whether a kernel of `num_sms` CTAs, one per SM, whose items are tiles of tile_rows rows, plans for
// itself: a lane holds a sequence, two the rows outside, and without a counter that CTAs share items
// are handed out in fixed turn. So many rows hold only so many sequences of more than long_rows().
constexpr int kOwnPlanSeqs = 30;
template <typename Params>
bool takes_own_plan(const Params& params, const OffsetsView& offsets, int tile_rows, int heads,
                    int num_sms) {
  constexpr int kMaxSeqs = 128;  // of which a warp reads all lengths
  // Items of causal tiles are of unequal length.
  const bool is_even = !std::is_same_v<Params, AttentionBackwardParams> &&
                       params.window_right >= AttentionParams::kUnbounded;
  const int rounds = is_even ? 6 : 3;
  const int64_t num_seqs = params.q_offsets.num_seqs,
                most = params.q_offsets.total / (long_rows(params) + 1);
  return (num_seqs <= kOwnPlanSeqs || (num_seqs <= kMaxSeqs && most <= kOwnPlanSeqs)) &&
         num_tiles(offsets.total, 0, tile_rows) + (num_seqs < most ? num_seqs : most) <=
             int64_t{rounds} * num_sms / heads;
}

// Whether a kernel has any item of a sequence; all kThreads of a CTA.
template <int kThreads>
__device__ __forceinline__ bool any_planned(const AttentionParams& params) {
  if (!params.plans_itself) {
    if (!params.plan_is_there) ptx::griddepcontrol_wait();
    return __ldcg(&static_cast<const LongPlan*>(params.long_plan)->num_tiles) > 0;
  }
  return any_sequence<kThreads>(params, [&](int seq) {
    return planned_length(params, seq, sequence_rows(params.q_offsets, seq).len) >= 0;
  });
}

// Launches a kernel that plans for itself: the first on the stream unless those for tiny or other
// sequences come before.
template <auto kKernel, typename Params>
cudaError_t launch_planning(const AttentionParams& attention, const Params& params,
                            const Grid& grid, int threads, int shared_bytes, cudaStream_t stream,
                            const char* path) {
  return long_rows(attention) == 0 && !attention.split_by_length
             ? launch<kKernel>(params, grid, threads, shared_bytes, stream, path)
             : launch_dependent<kKernel>(params, grid, threads, shared_bytes, stream, path);
}

// Hands out a plan's items: by sequence, head, tile of queries. One warp.
class PlannedItems {
 public:
  __device__ __forceinline__ PlannedItems(LongPlan* plan, int heads)
      : plan_(plan),
        heads_(heads),
        num_sequences_(__ldcg(&plan->num_sequences)),
        num_tiles_(__ldcg(&plan->num_tiles)),
        num_items_(static_cast<int64_t>(num_tiles_) * heads) {}

  // The plan of another kernel, or where params.plans_itself this warp's own. Items are tiles of kTile
  // queries, or keys. (Where plan_is_there the kernel in front is not waited for: nobody reads what it
  // computes.)
  template <int kTile, bool kOfKeys>
  __device__ __forceinline__ static PlannedItems of(const AttentionParams& params, int heads) {
    if (params.plans_itself) return PlannedItems(params, heads, Constant<kTile>{}, kOfKeys);
    if (!params.plan_is_there) ptx::griddepcontrol_wait();
    return PlannedItems(static_cast<LongPlan*>(params.long_plan), heads);
  }

  // False if there are no more.
  __device__ __forceinline__ bool next(PlannedSequence& sequence, int64_t& item_in_sequence) {
    if (plan_ == nullptr) return next_of_own(sequence, item_in_sequence);
    return find(take(), sequence, item_in_sequence);
  }
  // The number of calls before, of all warps.
  __device__ __forceinline__ int64_t take() {
    unsigned long long taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(&plan_->next_item, 1ull);
    return static_cast<int64_t>(__shfl_sync(0xffffffffu, taken, 0));
  }
  // Whether there is such an item, and where it is; no lower one than at the call before.
  __device__ __forceinline__ bool find(int64_t item, PlannedSequence& sequence,
                                       int64_t& item_in_sequence) {
    const int lane = threadIdx.x % 32;
    if (item >= num_items_) return false;
    // Items only rise, so the search starts at the last sequence; next ones are likely near.
    int high = num_sequences_;
    for (int step = 1; high - rank_ > 1; step = (high - rank_ + 32) / 33) {
      const int probe = rank_ + step * (lane + 1);
      const bool before =
          probe < high &&
          static_cast<int64_t>(__ldcg(&plan_->sequences[probe].first_tile)) * heads_ <= item;
      const int passed = __popc(__ballot_sync(0xffffffffu, before));
      rank_ += step * passed;
      if (passed < 32) high = min(high, rank_ + step);
    }
    sequence = sequence_at(rank_);
    item_in_sequence = item - static_cast<int64_t>(sequence.first_tile) * heads_;
    return true;
  }
  __device__ __forceinline__ PlannedSequence sequence_at(int rank) const {
    const int4 found = __ldcg(reinterpret_cast<const int4*>(&plan_->sequences[rank]));
    return {found.x, found.y, found.z, found.w};
  }
  // The same in another order, in which the first tile of each sequence and head comes before the other
  // tiles of those that are `ahead` sequences and heads before it in the plan. Of sequences that have
  // all a tile of kTile rows. `ahead` is at most their number times the heads.
  template <int kTile>
  __device__ __forceinline__ bool next_first_ahead(PlannedSequence& sequence, int& tile, int& head,
                                                   int ahead) {
    for (;;) {
      const int64_t turn = take();
      // Sequence and head, as they follow each other in the plan.
      int unit = static_cast<int>(turn);
      if (turn >= ahead) {
        int64_t index;
        if (!find(turn - ahead, sequence, index)) return false;
        const int tiles = (sequence.num_queries + kTile - 1) / kTile;
        tile = static_cast<int>(index) % tiles;
        head = static_cast<int>(index) / tiles;
        if (tile > 0) return true;
        unit = rank_ * heads_ + head + ahead;
        if (unit >= num_units()) continue;
      }
      tile = 0;
      head = unit % heads_;
      sequence = sequence_at(unit / heads_);
      return true;
    }
  }
  // Sequences with all their heads; memory has no room for the operands of 2^30.
  __device__ __forceinline__ int num_units() const { return num_sequences_ * heads_; }
  // The same in another order, in which tiles of one sequence and head lie at least kApart items apart
  // where there are so many: heads fastest, then sequences that lie together in the plan, then tiles,
  // from the first to the last.
  __device__ __forceinline__ bool next_apart(PlannedSequence& sequence, int& tile, int& head) {
    constexpr int kApart = 8;
    constexpr unsigned kAll = 0xffffffffu;
    int64_t item;
    if (!next(sequence, item)) return false;
    const int together = heads_ < kApart ? kApart / heads_ : 1, first = rank_ / together * together;
    const int lane = threadIdx.x % 32, own = first + lane;
    PlannedSequence mine = {};
    int tiles = 0;
    if (lane < together && own < num_sequences_) {
      const int4 found = __ldcg(reinterpret_cast<const int4*>(&plan_->sequences[own]));
      mine = {found.x, found.y, found.z, found.w};
      tiles =
          (own + 1 < num_sequences_ ? __ldcg(&plan_->sequences[own + 1].first_tile) : num_tiles_) -
          found.x;
    }
    const int before = sequence.first_tile - __shfl_sync(kAll, mine.first_tile, 0);
    const int place = before + static_cast<int>(item / heads_);  // among their tiles
    head = static_cast<int>(item % heads_);
    int low = 0, high = __reduce_max_sync(kAll, tiles);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (__reduce_add_sync(kAll, min(tiles, middle)) <= place) {
        low = middle;
      } else {
        high = middle;
      }
    }
    tile = low;
    const int turn = place - __reduce_add_sync(kAll, min(tiles, low));
    const unsigned have = __ballot_sync(kAll, tiles > low);
    const bool is_it = tiles > low && __popc(have & ((1u << lane) - 1)) == turn;
    sequence = shuffled(mine, __ffs(static_cast<int>(__ballot_sync(kAll, is_it))) - 1);
    return true;
  }

 private:
  // A lane gets a sequence, of more than kOwnPlanSeqs one that is planned, or rows outside; longer ones come
  // first, of equal ones those of lower lanes.
  template <int kTile>
  __device__ __forceinline__ PlannedItems(const AttentionParams& params, int heads,
                                          Constant<kTile> /*tile*/, bool of_keys)
      : plan_(nullptr), heads_(heads) {
    const int lane = threadIdx.x % 32, num_seqs = static_cast<int>(params.q_offsets.num_seqs);
    const auto planned = [&](int seq, PlannedSequence& sequence) {
      if (seq >= num_seqs) return -1;
      const RowRange rows = sequence_rows(params.q_offsets, seq);
      sequence = {0, static_cast<int>(rows.begin), static_cast<int>(rows.len), seq};
      return planned_length(params, seq, rows.len);
    };
    int length = -1, count = num_seqs;  // keys; lanes that may have a sequence
    if (num_seqs <= kOwnPlanSeqs) {
      length = planned(lane, own_);
    } else {
      count = 0;
#pragma unroll 1
      for (int first = 0; first < num_seqs; first += 32) {
        PlannedSequence candidate = {};
        const int its = planned(first + lane, candidate);
        const unsigned found = __ballot_sync(0xffffffffu, its >= 0);
        const int from = set_bit(found, lane - count),
                  next_length = __shfl_sync(0xffffffffu, its, from);
        const PlannedSequence next = shuffled(candidate, from);
        const int last = min(count + __popc(found), kOwnPlanSeqs);
        if (lane >= count && lane < last) {
          own_ = next;
          length = next_length;
        }
        count = last;
      }
    }
    int rows = own_.num_queries << params.packed_shift;
    if (of_keys) rows = length;
    if (params.planned.outside) {
      if (lane >= count && lane < count + 2) {
        const OffsetsView& tiled = of_keys ? params.kv_offsets : params.q_offsets;
        const bool before = lane == count;
        const int first = before ? 0 : static_cast<int>(clamped_offset(tiled, num_seqs)),
                  last = static_cast<int>(before ? clamped_offset(tiled, 0) : tiled.total);
        own_ = {0, first, last - first, -1};
        rows = last - first;
        length = 0;
      }
      count += 2;
    }
    const int tiles = length >= 0 ? (rows + kTile - 1) / kTile : 0;
    int before = 0;
#pragma unroll 4
    for (int other = 0; other < (count + 3) / 4 * 4; ++other) {
      const int its_length = __shfl_sync(0xffffffffu, length, other),
                its_tiles = __shfl_sync(0xffffffffu, tiles, other);
      if (its_length > length || (its_length == length && other < lane)) before += its_tiles;
    }
    own_.first_tile = before;
    own_end_ = before + tiles;
    num_items_ = __reduce_add_sync(0xffffffffu, tiles) * heads;
  }

  // The place of the index-th of `bits`, some place if there are fewer. A loop as it stands: so short a
  // kernel waits for its instructions.
  __device__ __forceinline__ static int set_bit(unsigned bits, int index) {
    int place = 0;
#pragma unroll 1
    for (int width = 16; width > 0; width /= 2) {
      const int below = __popc(bits >> place & ((1u << width) - 1));
      if (index >= below) {
        index -= below;
        place += width;
      }
    }
    return place;
  }

  __device__ __forceinline__ static PlannedSequence shuffled(const PlannedSequence& sequence,
                                                             int lane) {
    return {__shfl_sync(0xffffffffu, sequence.first_tile, lane),
            __shfl_sync(0xffffffffu, sequence.begin, lane),
            __shfl_sync(0xffffffffu, sequence.num_queries, lane),
            __shfl_sync(0xffffffffu, sequence.seq, lane)};
  }

  // Every other round goes backwards, since items become shorter.
  __device__ __forceinline__ bool next_of_own(PlannedSequence& sequence,
                                              int64_t& item_in_sequence) {
    const unsigned place = round_ % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int item = static_cast<int>(round_++ * gridDim.x + place);
    if (item >= num_items_) return false;
    const bool is_its = own_.first_tile * heads_ <= item && item < own_end_ * heads_;
    sequence = shuffled(own_, __ffs(static_cast<int>(__ballot_sync(0xffffffffu, is_its))) - 1);
    item_in_sequence = item - sequence.first_tile * heads_;
    return true;
  }

  LongPlan* plan_;  // null: own_ is a lane's part of the plan
  const int heads_;
  int num_sequences_ = 0;
  int num_tiles_ = 0;
  int64_t num_items_;
  int rank_ = 0;
  unsigned round_ = 0;
  PlannedSequence own_ = {0, 0, 0, -1};
  int own_end_ = 0;  // behind its last tile
};

}  // namespace jagged_cuda::attention
