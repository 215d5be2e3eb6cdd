// The gradients of tables (contract/score_bias.h): sums of dS over all scores of a bucket, each in an
// order that sizes and times alone decide.
#pragma once

#include "cuda/kernels/attention/bias.cuh"

namespace jagged_cuda::attention {

// Lanes of the same bucket add up in a tree that their numbers alone decide; one of them adds the
// result to sums[bucket]. All 32 lanes of a warp together.
template <typename T>
__device__ __forceinline__ void add_by_bucket(T* sums, int bucket, T value) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const unsigned peers = __match_any_sync(kAll, bucket), below = (1u << lane) - 1;
  int rank = __popc(peers & below);
  unsigned left = peers & ~below & ~(1u << lane);  // peers behind this lane, not yet added
  while (__any_sync(kAll, left != 0)) {
    const int next = __ffs(static_cast<int>(left));
    const T other = __shfl_sync(kAll, value, next == 0 ? lane : next - 1);
    if (next != 0) value += other;
    left &= ~__ballot_sync(kAll, rank % 2 == 1);
    rank /= 2;
  }
  if ((peers & below) == 0) sums[bucket] += value;
  __syncwarp();
}

// The sums of one of the warps that share a head, in global memory: nothing else reads or writes them.
template <typename T>
struct TableSums {
  T* times;      // [time_buckets]
  T* positions;  // [position_buckets]

  // Those of `part` and `head`, out of all in params.time_sums: [parts, H, buckets].
  __device__ __forceinline__ TableSums(const AttentionBackwardParams& params, int64_t part,
                                       int head) {
    const ScoreBias& bias = params.bias;
    const int64_t line = part * params.heads + head;
    times = bias.time_table == nullptr
                ? nullptr
                : static_cast<T*>(params.time_sums) + line * bias.time_buckets;
    positions = bias.position_table == nullptr
                    ? nullptr
                    : static_cast<T*>(params.position_sums) + line * bias.position_buckets;
  }

  // Adds one dS per lane, 0 where a key is not seen. All 32 lanes together.
  __device__ __forceinline__ void add(const HeadBias<T>& bias, int64_t row, int64_t key, T value) {
    if (times != nullptr) add_by_bucket(times, bias.time_bucket(row, key), value);
    if (positions != nullptr) add_by_bucket(positions, bias.position_bucket(row, key), value);
  }
};

// One number per lane of a warp, which goes to one bucket as long as no other is named.
struct PendingSum {
  float sum = 0.0f;
  int bucket = -1;

  // All 32 lanes of a warp together, with the same bucket.
  __device__ __forceinline__ void add(float* sums, int to, float value, int lane) {
    if (to != bucket) flush(sums, lane);
    bucket = to;
    sum += value;
  }
  __device__ __forceinline__ void flush(float* sums, int lane) {
    if (bucket >= 0) add_of_all(sums + bucket, sum, lane);
    bucket = -1;
    sum = 0.0f;
  }
  __device__ __forceinline__ static void add_of_all(float* to, float value, int lane) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (lane == 0) *to += value;
    __syncwarp();
  }
};

// The sums of a warp in shared memory, of dS of its 16 rows and steps of kBlocks * 8 keys.
template <int kBlocks>
struct WarpTableSums {
  // dS added up over rows and columns 8 further on, [column block less row block][row][column].
  static constexpr int kPlanes = kBlocks + 1, kPlane = 8 * 8 + 8;
  using Diagonals = float[kPlanes][kPlane];

  float* times;
  float* positions;
  Diagonals& diagonals;
  PendingSum pending_time;
  PendingSum pending_position;

  __device__ __forceinline__ WarpTableSums(const ScoreBias& bias, float* sums, Diagonals& diagonals)
      : times(sums),
        positions(sums + (bias.time_table == nullptr ? 0 : bias.time_buckets)),
        diagonals(diagonals) {}

  // dS is 0 where a key is not seen. All 32 lanes together.
  template <typename Bias>
  __device__ __forceinline__ void add(const Bias& bias, const Accumulator<1, kBlocks>& ds,
                                      const typename Bias::Step& step, const TimeCells& cells,
                                      int64_t column, int lane) {
    if (bias.bias.time_table != nullptr) add_times(bias, ds, step, cells, column, lane);
    if (bias.bias.position_table != nullptr) add_positions(bias, ds, column, lane);
  }
  __device__ __forceinline__ void flush(int lane) {
    pending_time.flush(times, lane);
    pending_position.flush(positions, lane);
  }

 private:
  __device__ __forceinline__ static float sum_of(const Accumulator<1, kBlocks>& ds) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) sums[i % 4] += ds[0][i / 4][i % 4];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  template <typename Bias>
  __device__ __forceinline__ void add_times(const Bias& bias, const Accumulator<1, kBlocks>& ds,
                                            const typename Bias::Step& step, const TimeCells& cells,
                                            int64_t column, int lane) {
    const auto groups = bias.time_groups(step, cells, lane);
    if (groups.narrow && groups.are_one()) {
      pending_time.add(times, groups.first, sum_of(ds), lane);
      return;
    }
    int buckets[kBlocks][4];
    const auto keep = [&](int, int block, int i, int bucket) { buckets[block][i] = bucket; };
    if (!groups.narrow) {
      const TimeRange range = bias.time_range(step, lane);
      bias.template for_each_bucket<kBlocks>(range, step, column, lane, keep);
      add_buckets<kBlocks>(ds, buckets, 0, range.first, range.last, lane);
      return;
    }
    constexpr int kGroupBlocks = Bias::kGroup / 8;
#pragma unroll
    for (int group = 0; group < Bias::kGroups; ++group) {
      const int first = groups.first_of(group), last = groups.last_of(group);
      bias.for_each_of_group(
          group, first, last, step, lane, [](int bucket) { return bucket; }, keep);
      add_buckets<kGroupBlocks>(ds, buckets, group * kGroupBlocks, first, last, lane);
    }
  }

  // The sums of some blocks of columns.
  template <int kSome>
  __device__ __forceinline__ void add_buckets(const Accumulator<1, kBlocks>& ds,
                                              const int (&buckets)[kBlocks][4], int block,
                                              int first, int last, int lane) {
    constexpr int kFew = 12;
    if (first == last) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSome * 4; ++i) sum += ds[0][block + i / 4][i % 4];
      pending_time.add(times, first, sum, lane);
    } else if (last - first < kFew) {
#pragma unroll 1
      for (int bucket = first; bucket <= last; ++bucket) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kSome * 4; ++i)
          sum += buckets[block + i / 4][i % 4] == bucket ? ds[0][block + i / 4][i % 4] : 0.0f;
        PendingSum::add_of_all(times + bucket, sum, lane);
      }
    } else {
      // One element after another, of all in registers.
#pragma unroll 1
      for (int element = 0; element < kSome * 4; ++element) {
        int bucket = 0;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kSome * 4; ++i) {
          if (i != element) continue;
          bucket = buckets[block + i / 4][i % 4];
          value = ds[0][block + i / 4][i % 4];
        }
        add_by_bucket(times, bucket, value);
      }
    }
  }

  template <typename Bias>
  __device__ __forceinline__ void add_positions(const Bias& bias, const Accumulator<1, kBlocks>& ds,
                                                int64_t column, int lane) {
    constexpr int kDiagonals = 16 + kBlocks * 8 - 1;
    const ScoreBias& score = bias.bias;
    const int last = score.position_buckets - 1;
    // Of diagonal 0, column 0 less row 15, which is the furthest away.
    const int64_t farthest = bias.distance(column) + 15 - score.position_first;
    const int64_t nearest = farthest - (kDiagonals - 1);
    if (farthest <= 0 || nearest >= last) {
      pending_position.add(positions, farthest <= 0 ? 0 : last, sum_of(ds), lane);
      return;
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = plane - 1 + half;
        if (block < 0 || block >= kBlocks) continue;
        sum.x += ds[0][block][2 * half];
        sum.y += ds[0][block][2 * half + 1];
      }
      *reinterpret_cast<float2*>(&diagonals[plane][2 * lane]) = sum;
    }
    __syncwarp();
    // Diagonal d is column - row + 15; plane p has those of p * 8 + 7 + column - row.
#pragma unroll
    for (int round = 0; round < (kDiagonals + 31) / 32; ++round) {
      const int diagonal = round * 32 + lane, x = diagonal % 8;
      float sum = 0.0f;
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int plane = diagonal / 8 - (row < 7 - x ? 1 : 0);
        if (plane >= 0 && plane < kPlanes) sum += diagonals[plane][row * 8 + (row + x + 1) % 8];
      }
      const bool there = diagonal < kDiagonals;
      const int64_t bucket = farthest - diagonal;
      if (there && bucket > 0 && bucket < last) positions[bucket] += sum;
      const bool clamped = there && (bucket <= 0 || bucket >= last);
      if (__any_sync(0xffffffffu, clamped)) {
        const bool to_first = bucket <= 0;
        PendingSum::add_of_all(positions, clamped && to_first ? sum : 0.0f, lane);
        PendingSum::add_of_all(positions + last, clamped && !to_first ? sum : 0.0f, lane);
      }
    }
    __syncwarp();
  }
};

}  // namespace jagged_cuda::attention
