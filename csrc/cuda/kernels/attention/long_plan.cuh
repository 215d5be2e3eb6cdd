// Which sequences the kernel for long ones takes, longest first, so that the last items of a
// persistent kernel are short ones. Where it takes all, the rows outside all sequences come last, as
// sequences without keys (in the backward pass for dk and dv: without queries). One CTA sorts sequences by counting into kPlanBins bins of their numbers of keys; the
// order within a bin is not fixed, and no result depends on it.
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

// Items are tiles of kTile queries, in the backward pass of keys.
template <int kTile, typename Params>
__global__ __launch_bounds__(kPlanThreads) void plan_long(
    const __grid_constant__ Params attention) {
  constexpr bool kOfKeys = std::is_same_v<Params, AttentionBackwardParams>;
  __shared__ int counts[kPlanBins];
  __shared__ int warp_tiles[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t num_seqs = attention.q_offsets.num_seqs;
  LongPlan& plan = *static_cast<LongPlan*>(attention.long_plan);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < kPlanBins) counts[threadIdx.x] = 0;
  __syncthreads();

  // The place of a long sequence's bin, -1 for others.
  const bool takes_all = long_rows(attention) == 0;
  const auto bin_of = [&](int64_t seq) {
    if (seq >= num_seqs) return -1;
    const int64_t num_queries = sequence_rows(attention.q_offsets, seq).len;
    if (!(takes_all && kOfKeys) && !left_to_long(attention, num_queries)) return -1;
    return plan_bin(keys_of(attention, seq, num_queries));
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
      const int rows =
          kOfKeys ? keys_of(attention, sequence.seq, sequence.num_queries) : sequence.num_queries;
      tiles = (rows + kTile - 1) / kTile;
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
    if (takes_all) {
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
  }
  // So that this kernel does not end before that which it runs beside.
  ptx::griddepcontrol_wait();
}

template <int kTile, typename Params>
cudaError_t launch_plan(const Params& params, cudaStream_t stream) {
  return launch_longer<plan_long<kTile, Params>>(params, params, Grid{1}, kPlanThreads, 0, stream,
                                                 nullptr);
}

// Hands out a plan's items: by sequence, head, tile of queries. One warp.
class PlannedItems {
 public:
  __device__ __forceinline__ PlannedItems(LongPlan* plan, int heads)
      : plan_(*plan),
        heads_(heads),
        num_sequences_(__ldcg(&plan->num_sequences)),
        num_items_(static_cast<int64_t>(__ldcg(&plan->num_tiles)) * heads) {}

  // False if there are no more.
  __device__ __forceinline__ bool next(PlannedSequence& sequence, int64_t& item_in_sequence) {
    const int lane = threadIdx.x % 32;
    unsigned long long taken = 0;
    if (lane == 0) taken = atomicAdd(&plan_.next_item, 1ull);
    const int64_t item = static_cast<int64_t>(__shfl_sync(0xffffffffu, taken, 0));
    if (item >= num_items_) return false;
    // Items only rise, so the search starts at the last sequence; next ones are likely near.
    int high = num_sequences_;
    for (int step = 1; high - rank_ > 1; step = (high - rank_ + 32) / 33) {
      const int probe = rank_ + step * (lane + 1);
      const bool before =
          probe < high &&
          static_cast<int64_t>(__ldcg(&plan_.sequences[probe].first_tile)) * heads_ <= item;
      const int passed = __popc(__ballot_sync(0xffffffffu, before));
      rank_ += step * passed;
      if (passed < 32) high = min(high, rank_ + step);
    }
    const int4 found = __ldcg(reinterpret_cast<const int4*>(&plan_.sequences[rank_]));
    sequence = {found.x, found.y, found.z, found.w};
    item_in_sequence = item - static_cast<int64_t>(found.x) * heads_;
    return true;
  }

 private:
  LongPlan& plan_;
  const int heads_, num_sequences_;
  const int64_t num_items_;
  int rank_ = 0;
};

}  // namespace jagged_cuda::attention
