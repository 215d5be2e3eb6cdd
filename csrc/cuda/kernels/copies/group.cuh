// First kernel of jagged_index_select: groups the copies by their sequences, and plans where they begin.
//
// It writes the rows of the copies of the first sequence, then those of the next, and groups[b] = where those
// of b begin. Both are counts over all keys, number * kMostCounted + k, where number is the sequence's:
//     place of k = # { keys below that of k },   groups[b] = # { keys below that of b without copy }.
// A copy before which none has its number is its sequence's first, and says where it is: the second kernel
// then need not ask for more where a sequence has no other. The offsets of the copies are made here too:
// each CTA adds the lengths of all copies before its own. Nothing is sorted or added atomically.
//
// Grid: x, a CTA for each 32 of these M + B + 1 counts, a lane for each; each of its warps counts over a part
// of the keys, four at a time from shared memory, where all are.
// Shared memory: keys (16 KiB) and the counts and lengths of all warps (8 KiB), each published by a barrier.
//
// Backward, where a sort has grouped the copies already, it is only followed: a thread for each copy.
#pragma once

#include "cuda/kernels/copies/copies.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::copies {

constexpr int kGroupWarps = 32;
constexpr int kNoKey = 0x7fffffff;  // behind every copy's
constexpr int kFollowThreads = 256;

// How many rows copy `copy` has if all of them are taken; none if there is no such copy.
__device__ __forceinline__ int64_t planned_len(const GroupCopiesParams& params, int64_t copy) {
  if (copy >= params.num_copies) return 0;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return 0;
  return sequence_rows(params.source, number).len;
}

// Writes where copy `copy` begins, and says which rows are left of it.
__device__ __forceinline__ CopyRows plan_copy(const GroupCopiesParams& params, int64_t copy,
                                              int64_t begin, int64_t len) {
  const auto cut = [&](int64_t place) { return place < params.capacity ? place : params.capacity; };
  if (params.source.wide) {
    static_cast<int64_t*>(params.planned)[copy] = cut(begin);
  } else {
    static_cast<int*>(params.planned)[copy] = static_cast<int>(cut(begin));
  }
  if (params.uncut != nullptr) params.uncut[copy] = begin;
  return {cut(begin), cut(begin + len) - cut(begin)};
}

// The sum of `own` over the lanes up to this one.
__device__ __forceinline__ int64_t sum_up_to_lane(int64_t own) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, own, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) own += other;
  }
  return own;
}

static __global__ __launch_bounds__(kGroupWarps * 32) void group_copies_kernel(
    const __grid_constant__ GroupCopiesParams params) {
  ptx::griddepcontrol_launch_dependents();  // the second kernel finds its tiles meanwhile
  __shared__ alignas(16) int sKeys[kMostCounted];
  __shared__ int sBefore[kGroupWarps][32], sLess[kGroupWarps][32];
  __shared__ int64_t sRows[kGroupWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int copies = static_cast<int>(params.num_copies);
  const int seqs = static_cast<int>(params.num_seqs);
  const int first = static_cast<int>(blockIdx.x) * 32, item = first + lane;
  const bool is_copy = item < copies;
  const int64_t own_len = warp == 0 ? planned_len(params, item) : 0;
  // Shares are whole vectors.
  const int share = (copies + 4 * kGroupWarps - 1) / (4 * kGroupWarps) * 4;
  int64_t rows = 0;  // of the copies before this CTA's
#pragma unroll 4
  for (int k = threadIdx.x; k < share * kGroupWarps; k += kGroupWarps * 32) {
    const int64_t number = k < copies ? __ldg(params.chosen + k) : 0;
    // Numbers that are none of a sequence come first or last.
    const int cut = number < 0 ? -1 : number < seqs ? static_cast<int>(number) : seqs;
    sKeys[k] = k < copies ? cut * static_cast<int>(kMostCounted) + k : kNoKey;
    if (k < first) rows += planned_len(params, k);
  }
  rows = sum_up_to_lane(rows);
  if (lane == 31) sRows[warp] = rows;
  __syncthreads();  // all keys are there, and the rows of each warp
  const int own_key = is_copy ? sKeys[item] : (item - copies) * static_cast<int>(kMostCounted);
  // Of a sequence: no copy comes before the first that could have its number.
  const int first_key = own_key - (is_copy ? item : 0);
  int before = 0, less = 0;
#pragma unroll 4
  for (int k = warp * share; k < (warp + 1) * share; k += 4) {
    const int4 keys = *reinterpret_cast<const int4*>(&sKeys[k]);
    before += (keys.x < own_key ? 1 : 0) + (keys.y < own_key ? 1 : 0) + (keys.z < own_key ? 1 : 0) +
              (keys.w < own_key ? 1 : 0);
    less += (keys.x < first_key ? 1 : 0) + (keys.y < first_key ? 1 : 0) +
            (keys.z < first_key ? 1 : 0) + (keys.w < first_key ? 1 : 0);
  }
  sBefore[warp][lane] = before;
  sLess[warp][lane] = less;
  __syncthreads();  // the counts of all warps are there
  if (warp != 0) return;
  int sum = 0, sum_less = 0;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    sum += sBefore[w][lane];
    sum_less += sLess[w][lane];
  }
  int64_t end = sum_up_to_lane(own_len);
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) end += sRows[w];
  CopyRows own{0, 0};
  if (item <= copies) own = plan_copy(params, item, end - own_len, own_len);
  if (is_copy) {
    params.copies[sum] = own;
    const int number = (own_key - item) / static_cast<int>(kMostCounted);
    if (sum == sum_less && number >= 0 && number < seqs) params.firsts[number] = own;
  } else if (item - copies <= seqs) {
    params.groups[item - copies] = sum;
  }
}

static __global__ __launch_bounds__(kFollowThreads) void follow_order_kernel(
    const __grid_constant__ FollowOrderParams params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t place = blockIdx.x * int64_t{kFollowThreads} + threadIdx.x;
  if (place >= params.num_copies) return;
  const int64_t copy = __ldg(params.order + place);
  const CopyRows own = rows_of_copy(params.taken, copy);
  params.copies[place] = own;
  if (copy < 0 || copy >= params.num_copies) return;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return;
  if (__ldg(params.groups + number) == place) params.firsts[number] = own;
}

}  // namespace jagged_cuda::copies
