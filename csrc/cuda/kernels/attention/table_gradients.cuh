// The gradients of tables beside dq on wgmma (ranged_backward.cuh): sums of dS over all scores of a
// bucket, in an order that sizes and times alone decide.
//
// Times: each warp has sums of its own, in shared memory; what belongs to the same bucket as before
// stays in registers. Positions: a step's diagonals are added up by each warp, and those of the four
// warps behind the next barrier by one thread each, to the sums of the CTA. What lies beyond the ends
// of the table stays in registers till the end.
#pragma once

#include "cuda/kernels/attention/logit_bias.cuh"
#include "cuda/kernels/attention/table_sums.cuh"

namespace jagged_cuda::attention {

// In shared memory; behind it [kWarps][time_buckets] and [position_buckets] sums.
struct TableGradientStorage {
  static constexpr int kWarps = 4, kDiagonals = 16 + 64 - 1;
  // dS added up over rows and columns 8 further on: [column block less row block][row][column].
  // Those that 32 diagonals want, at a time.
  static constexpr int kPlanes = 9, kPlane = 8 * 8 + 8, kSomePlanes = 5;
  float planes[kWarps][kSomePlanes][kPlane];
  float diagonals[2][kWarps][kDiagonals + 1];
};

template <BiasKind kKind>
class TableGradients {
  using Storage = TableGradientStorage;
  using Scores = Accumulator<1, 8>;
  using Bias = LogitBias<kKind, false>;

 public:
  // `sums` are those behind `shared`, full of zeros.
  __device__ __forceinline__ TableGradients(const ScoreBias& bias, Storage& shared, float* sums)
      : shared_(shared),
        times_(sums + threadIdx.x / 32 * time_buckets(bias)),
        positions_(sums + Storage::kWarps * time_buckets(bias)) {}

  __host__ __device__ __forceinline__ static int time_buckets(const ScoreBias& bias) {
    return bias.time_table == nullptr ? 0 : bias.time_buckets;
  }
  __host__ __device__ __forceinline__ static int position_buckets(const ScoreBias& bias) {
    return bias.position_table == nullptr ? 0 : bias.position_buckets;
  }

  // dS of the step from `column` on, 0 where a key is not seen. All threads.
  __device__ __forceinline__ void add(Bias& bias, const Scores& ds, const typename Bias::Step& step,
                                      int column, int lane) {
    if constexpr (kKind == BiasKind::kAny) {
      if (bias.bias().time_table != nullptr) add_times(bias, ds, step, column, lane);
    }
    if (kKind == BiasKind::kPositions || bias.bias().position_table != nullptr)
      add_positions(bias, ds, column, lane);
  }

  // Behind the barrier that follows add(): the four warps' diagonals. All threads.
  __device__ __forceinline__ void merge() {
    if (!pending_) return;
    pending_ = false;
    const int diagonal = static_cast<int>(threadIdx.x);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Storage::kWarps; ++warp) {
      const int own = diagonal - 48 + 16 * warp;
      if (own >= 0 && own < Storage::kDiagonals) sum += shared_.diagonals[stage_][warp][own];
    }
    stage_ ^= 1;
    if (diagonal == 127) return;
    const int bucket = farthest_ - diagonal;
    if (bucket <= 0) {
      low_ += sum;
    } else if (bucket >= last_) {
      high_ += sum;
    } else {
      positions_[bucket] += sum;
    }
  }

  // Behind the last tile: the CTA's sums leave. All threads.
  __device__ __forceinline__ void finish(const AttentionBackwardParams& params, int lane) {
    const ScoreBias& bias = params.bias;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (PendingSum& pending : pending_times_) pending.flush(times_, lane);
    __syncthreads();  // the diagonals have been read
    float* ends = &shared_.diagonals[0][0][0];
    const float low = warp_sum(low_), high = warp_sum(high_);
    if (lane == 0) {
      ends[warp] = low;
      ends[Storage::kWarps + warp] = high;
    }
    __syncthreads();
    const int times = time_buckets(bias), positions = position_buckets(bias);
    const TableSums<float> results(params, blockIdx.x, blockIdx.y);
    const float* first = times_ - warp * times;
    for (int i = threadIdx.x; i < times; i += 128) {
      float sum = 0.0f;
      for (int each = 0; each < Storage::kWarps; ++each) sum += first[each * times + i];
      results.times[i] = sum;
    }
    for (int i = threadIdx.x; i < positions; i += 128) {
      float sum = positions_[i];
      // One bucket alone has both ends.
      if (i == 0) sum += (ends[0] + ends[1]) + (ends[2] + ends[3]);
      if (i == positions - 1) sum += (ends[4] + ends[5]) + (ends[6] + ends[7]);
      results.positions[i] = sum;
    }
  }

 private:
  __device__ __forceinline__ static float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }
  template <int kFirst, int kCount>
  __device__ __forceinline__ static float sum_of(const Scores& ds) {
    float sums[4] = {};
#pragma unroll
    for (int i = kFirst; i < kFirst + kCount; ++i) sums[i % 4] += ds[0][i / 4][i % 4];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  __device__ __forceinline__ void add_positions(const Bias& bias, const Scores& ds, int column,
                                                int lane) {
    constexpr int64_t kFar = int64_t{1} << 29;
    const int first = static_cast<int>(max(min(bias.bias().position_first, kFar), -kFar)),
              last = bias.bias().position_buckets - 1;
    const int farthest = bias.distance_of(0, column) - first;  // of diagonal 0
    if (farthest <= 0) {
      low_ += sum_of<0, 32>(ds);
      return;
    }
    if (farthest - 126 >= last) {
      high_ += sum_of<0, 32>(ds);
      return;
    }
    farthest_ = farthest;
    last_ = last;
    pending_ = true;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    auto& planes = shared_.planes[warp];
    // Diagonal d is column - row + 15; plane p has those of p * 8 + 7 + column - row.
    constexpr int kRounds = (Storage::kDiagonals + 31) / 32;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int first_plane = round * 4 - 1;  // that is wanted
#pragma unroll
      for (int i = 0; i < Storage::kSomePlanes; ++i) {
        const int plane = first_plane + i;
        if (plane < 0 || plane >= Storage::kPlanes) continue;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = plane - 1 + half;
          if (block < 0 || block >= 8) continue;
          sum.x += ds[0][block][2 * half];
          sum.y += ds[0][block][2 * half + 1];
        }
        *reinterpret_cast<float2*>(&planes[i][2 * lane]) = sum;
      }
      __syncwarp();
      const int diagonal = round * 32 + lane, x = diagonal % 8;
      float sum = 0.0f;
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int plane = diagonal / 8 - (row < 7 - x ? 1 : 0);
        if (plane >= 0 && plane < Storage::kPlanes)
          sum += planes[plane - first_plane][row * 8 + (row + x + 1) % 8];
      }
      if (diagonal < Storage::kDiagonals) shared_.diagonals[stage_][warp][diagonal] = sum;
      __syncwarp();
    }
  }

  __device__ __forceinline__ void add_times(Bias& bias, const Scores& ds,
                                            const typename Bias::Step& step, int column, int lane) {
    constexpr unsigned kAll = 0xffffffffu, kOfStep = 0xf;
    const int source = bias.find_groups(column);
    const TimeGroups& groups = bias.groups();
    const unsigned one = groups.one >> source & kOfStep, narrow = groups.narrow >> source & kOfStep;
    if ((one | narrow) != kOfStep) {
#pragma unroll 1
      for (int element = 0; element < 32; ++element) {
        float value = 0.0f;
#pragma unroll
        for (int e = 0; e < 32; ++e) value = e == element ? ds[0][e / 4][e % 4] : value;
        add_by_bucket(times_, bias.time_bucket(element / 4, element % 4, column, lane), value);
      }
      return;
    }
    if (one == kOfStep) {
      int buckets[4];
#pragma unroll
      for (int group = 0; group < 4; ++group)
        buckets[group] = __shfl_sync(kAll, groups.first, source + group);
      if (buckets[0] == buckets[1] && buckets[0] == buckets[2] && buckets[0] == buckets[3]) {
        add_pending(buckets[0], sum_of<0, 32>(ds), lane);
        return;
      }
    }
    const auto add_group = [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      const int first = __shfl_sync(kAll, groups.first, source + kGroup);
      if (one >> kGroup & 1) {
        add_pending(first, sum_of<kGroup * 8, 8>(ds), lane);
        return;
      }
      const int last = __shfl_sync(kAll, groups.last, source + kGroup);
      uint32_t away[8];
      const uint32_t from = bias.distances(away, kGroup, source + kGroup, step, lane);
      const auto sum_within = [&](uint32_t begin, uint32_t end) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sum += away[i] - begin < end - begin ? ds[0][kGroup * 2 + i / 4][i % 4] : 0.0f;
        return sum;
      };
      if (last == first + 1) {
        const uint32_t boundary = __shfl_sync(kAll, groups.boundary, source + kGroup);
        add_pending(last, sum_within(boundary, ~0u), lane);
        add_pending(first, sum_within(0, boundary), lane);
        return;
      }
      // Eight buckets at a time: each lane's sums to shared memory, where four lanes add up a bucket.
      constexpr int kTogether = 8, kLine = 32 + 1;
      static_assert(kTogether * kLine <= Storage::kSomePlanes * Storage::kPlane);
      float* lines = &shared_.planes[threadIdx.x / 32][0][0];
      uint32_t begin = 0;
#pragma unroll 1
      for (int bucket = first; bucket <= last; bucket += kTogether) {
        const uint32_t boundaries = TimeGroups::boundary_behind(
            bias.bias(), min(bucket + lane % kTogether, last - 1), from);
#pragma unroll 1
        for (int i = 0; i < kTogether; ++i) {
          const uint32_t behind = __shfl_sync(kAll, boundaries, i),
                         end = bucket + i < last ? behind : ~0u;
          lines[i * kLine + lane] = bucket + i <= last ? sum_within(begin, end) : 0.0f;
          begin = end;
        }
        __syncwarp();
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += lines[lane / 4 * kLine + lane % 4 * 8 + i];
        sum = quad_sum(sum);
        if (lane % 4 == 0 && bucket + lane / 4 <= last) times_[bucket + lane / 4] += sum;
        __syncwarp();
      }
    };
    add_group(std::integral_constant<int, 0>{});
    add_group(std::integral_constant<int, 1>{});
    add_group(std::integral_constant<int, 2>{});
    add_group(std::integral_constant<int, 3>{});
  }
  // Neighbouring buckets, between which groups alternate, have places of their own.
  __device__ __forceinline__ void add_pending(int bucket, float sum, int lane) {
    if (bucket % 2 == 0) {
      pending_times_[0].add(times_, bucket, sum, lane);
    } else {
      pending_times_[1].add(times_, bucket, sum, lane);
    }
  }

  Storage& shared_;
  float* times_;      // of the warp
  float* positions_;  // of the CTA
  PendingSum pending_times_[2];
  float low_ = 0.0f, high_ = 0.0f;  // of this lane: of the first and the last bucket of positions
  bool pending_ = false;            // whether diagonals wait for merge()
  int stage_ = 0;                   // where those of the next step go
  int farthest_, last_;             // of them: bucket of diagonal 0, if there were as many
};

}  // namespace jagged_cuda::attention
