// Buckets of the times between a tile of rows and a step of columns (contract/score_bias.h): of one
// row and one column exactly, in 64 bits; of many by the few buckets that they can have, in 32 bits.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

#include <climits>
#include <cstdint>

namespace jagged_cuda::attention {

// |one - other|
__device__ __forceinline__ uint64_t time_between(int64_t one, int64_t other) {
  return static_cast<uint64_t>(one > other ? one : other) -
         static_cast<uint64_t>(one > other ? other : one);
}

// How many of the boundaries [first, last) are at most `away`, and `first`.
__device__ __forceinline__ int bucket_of(const ScoreBias& bias, uint64_t away, int first,
                                         int last) {
  const int64_t largest = away < uint64_t{LLONG_MAX} ? static_cast<int64_t>(away) : LLONG_MAX;
#pragma unroll 1
  while (first < last) {
    const int middle = (first + last) / 2;
    const bool passed = __ldg(bias.boundaries + middle) <= largest;
    first = passed ? middle + 1 : first;
    last = passed ? last : middle;
  }
  return first;
}

// The times of some rows, from the soonest to the latest.
struct alignas(16) TimeSpan {
  int64_t soonest = LLONG_MAX;
  int64_t latest = LLONG_MIN;

  __device__ __forceinline__ void include(int64_t time) {
    soonest = min(soonest, time);
    latest = max(latest, time);
  }
  __device__ __forceinline__ TimeSpan load() const {
    const longlong2 both = __ldcg(reinterpret_cast<const longlong2*>(this));
    return {both.x, both.y};
  }
  // All lanes get the span of what all 32 have included.
  __device__ __forceinline__ void combine() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      soonest = min(soonest, __shfl_xor_sync(0xffffffffu, soonest, distance));
      latest = max(latest, __shfl_xor_sync(0xffffffffu, latest, distance));
    }
  }
};

// For distances below 2^31 the boundaries between them, found without a search: a cell has an eighth
// of a power of two, and mostly one boundary at most.
struct TimeCells {
  static constexpr int kCells = 256;
  static constexpr uint32_t kLimit = 1u << 31;
  static constexpr uint32_t kMany = 1u << 31;
  static constexpr float kZeroAs = 0.5f;  // 0 has a cell, as if it were a power of two
  // Of distances at the cell's begin the bucket, and the boundary behind which it is one more; kMany
  // where there are more boundaries.
  struct Cell {
    uint32_t boundary;
    uint32_t bucket;
  };
  Cell cells[kCells];

  __device__ __forceinline__ static int index_of(uint32_t away) {
    const float rounded = fmaxf(__uint2float_rz(away), kZeroAs);
    return static_cast<int>(__float_as_uint(rounded) >> 20) - static_cast<int>(0x3f000000u >> 20);
  }
  // The first distance in a cell or behind it.
  __device__ __forceinline__ static uint32_t begin_of(int index) {
    if (index == 0) return 0;
    const int power = index / 8 - 1, eighths = 8 + index % 8;
    return index < 8    ? 1
           : power >= 3 ? uint32_t(eighths) << (power - 3)
                        : uint32_t((eighths << power) + 7) / 8;
  }

  // The first cell that begins at a boundary or behind it.
  __device__ __forceinline__ static int cell_behind(int64_t boundary) {
    if (boundary <= 0) return 0;
    if (boundary >= kLimit) return kCells;
    const int index = index_of(static_cast<uint32_t>(boundary));
    return index + (begin_of(index) == boundary ? 0 : 1);
  }

  // By all threads, between two barriers. Whatever the boundaries are, cells name buckets.
  template <int kThreads>
  __device__ __forceinline__ void fill(const ScoreBias& bias) {
#pragma unroll 1
    for (int index = threadIdx.x; index < kCells; index += kThreads) cells[index] = {kLimit, 0};
    __syncthreads();
    const int last = bias.time_buckets - 1;
#pragma unroll 1
    for (int bucket = threadIdx.x; bucket <= last; bucket += kThreads) {
      const auto boundary = [&](int index) {
        return index < last ? __ldg(bias.boundaries + index) : LLONG_MAX;
      };
      const int64_t next = boundary(bucket), after = boundary(bucket + 1);
      const int end = cell_behind(next);
#pragma unroll 1
      for (int index = bucket == 0 ? 0 : cell_behind(boundary(bucket - 1)); index < end; ++index) {
        const int64_t cell_end = index + 1 < kCells ? begin_of(index + 1) : kLimit;
        cells[index] = {next < cell_end ? static_cast<uint32_t>(next) : kLimit,
                        static_cast<uint32_t>(bucket) | (after < cell_end ? kMany : 0)};
      }
    }
  }

  __device__ __forceinline__ int bucket(const ScoreBias& bias, uint32_t away) const {
    const Cell cell = cells[index_of(away)];
    const int bucket = static_cast<int>(cell.bucket & ~kMany);
    if (cell.bucket & kMany) return bucket_of(bias, away, bucket, bias.time_buckets - 1);
    return bucket + (away >= cell.boundary ? 1 : 0);
  }
};

// How far times of some queries and some keys are apart, as biases count it.
struct TimeDistances {
  uint64_t nearest;
  uint64_t farthest;
  uint64_t widest;  // in either direction, whether it counts or not
  bool is_ordered;  // no key is later than a query

  __device__ __forceinline__ TimeDistances(bool symmetric, const TimeSpan& query,
                                           const TimeSpan& key) {
    uint64_t before = 0, behind = 0;  // the keys furthest before and behind a query
    is_ordered = key.latest <= query.soonest;
    if (query.latest > key.soonest) before = time_between(query.latest, key.soonest);
    if (!is_ordered) behind = time_between(key.latest, query.soonest);
    nearest = is_ordered ? time_between(query.soonest, key.latest) : 0;
    if (symmetric && key.soonest > query.latest) nearest = time_between(key.soonest, query.latest);
    widest = max(before, behind);
    farthest = symmetric ? widest : before;
  }
};

// The buckets of the times between some queries and some keys.
struct TimeRange {
  int first;
  int last;

  __device__ __forceinline__ TimeRange(const ScoreBias& bias, const TimeSpan& query,
                                       const TimeSpan& key) {
    const TimeDistances away(bias.symmetric, query, key);
    first = bucket_of(bias, away.nearest, 0, bias.time_buckets - 1);
    last = bucket_of(bias, away.farthest, first, bias.time_buckets - 1);
  }
};

}  // namespace jagged_cuda::attention
