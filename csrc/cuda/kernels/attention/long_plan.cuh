// Which long sequences there are, longest first, so that the last items of a persistent kernel are
// short ones. One CTA sorts sequences by counting into kPlanBins bins of their numbers of keys; the
// order within a bin is not fixed, and no result depends on it.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::attention {

// A sequence, or the rows before or after all of them.
struct PlannedSequence {
  int first_tile;  // tiles of all that come before in the plan
  int begin;       // its rows in q
  int num_queries;
  int seq;  // -1: rows of no sequence
};

struct LongPlan {
  unsigned long long next_item;  // items handed out so far
  int num_sequences;
  int num_tiles;
  PlannedSequence sequences[1];  // [B + 2]

  static size_t bytes(int64_t num_seqs) {
    return sizeof(LongPlan) + static_cast<size_t>(num_seqs + 1) * sizeof(PlannedSequence);
  }
};

struct LongPlanParams {
  AttentionParams attention;
  LongPlan* plan;
  int tile_rows;
};

constexpr int kPlanThreads = 1024, kPlanBins = 64;

// Three bits of mantissa: bins are at most an eighth wide.
__device__ __forceinline__ int plan_bin(int num_keys) {
  const int blocks = num_keys / 64;
  if (blocks < 8) return kPlanBins - 1 - blocks;
  const int exponent = 31 - __clz(blocks);
  return max(0, kPlanBins - 1 - ((exponent - 2) * 8 + (blocks >> (exponent - 3) & 7)));
}

// This thread's place among those that count in the same bin. All lanes of a warp.
__device__ __forceinline__ int take_place(int* counts, int bin) {
  const unsigned peers = __match_any_sync(__activemask(), bin);
  const int lane = threadIdx.x % 32, leader = __ffs(static_cast<int>(peers)) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(&counts[bin], __popc(peers));
  return __shfl_sync(peers, first, leader) + __popc(peers & ((1u << lane) - 1));
}

__global__ __launch_bounds__(kPlanThreads) void plan_long(
    const __grid_constant__ LongPlanParams params) {
  __shared__ int counts[kPlanBins];
  __shared__ int warp_tiles[32];
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_segments = static_cast<int>(attention.q_offsets.num_seqs) + 2;
  LongPlan& plan = *params.plan;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < kPlanBins) counts[threadIdx.x] = 0;
  __syncthreads();

  const auto look_up = [&](int segment, PlannedSequence& found) {
    const int64_t begin = segment_bound(attention.q_offsets, segment),
                  end = segment_bound(attention.q_offsets, segment + 1);
    found.begin = static_cast<int>(begin);
    found.num_queries = end > begin ? static_cast<int>(end - begin) : 0;
    const bool inside = segment >= 1 && segment + 1 < num_segments;
    found.seq = inside ? segment - 1 : -1;
    if (!inside) return 0;
    if (attention.kv_offsets.data == attention.q_offsets.data) return found.num_queries;
    return static_cast<int>(sequence_rows(attention.kv_offsets, found.seq).len);
  };
  for (int segment = threadIdx.x; segment < num_segments; segment += kPlanThreads) {
    PlannedSequence found;
    const int num_keys = look_up(segment, found);
    if (found.num_queries > 0) take_place(counts, plan_bin(num_keys));
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
  for (int segment = threadIdx.x; segment < num_segments; segment += kPlanThreads) {
    PlannedSequence found;
    const int num_keys = look_up(segment, found);
    if (found.num_queries > 0) plan.sequences[take_place(counts, plan_bin(num_keys))] = found;
  }
  __syncthreads();
  const int num_sequences = plan.num_sequences;
  int tiles_before = 0;
  for (int first = 0; first < num_sequences; first += kPlanThreads) {
    const int rank = first + static_cast<int>(threadIdx.x);
    const int tiles =
        rank < num_sequences
            ? (plan.sequences[rank].num_queries + params.tile_rows - 1) / params.tile_rows
            : 0;
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
    plan.num_tiles = tiles_before;
    plan.next_item = 0;
  }
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
