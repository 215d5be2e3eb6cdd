// The gradients of tables beside dq on wgmma (ranged_backward.cuh): sums of dS over all scores of a
// bucket, in an order that sizes and times alone decide.
//
// Times: each warp has sums of its own, in shared memory. What a step with several buckets brings is
// rounded to whole numbers of a unit, 2^-20 of the largest or less: their sums are the same in any
// order, so that atomics of shared memory add them. Positions: a step's diagonals are added up by each
// warp, and those of the four warps behind the next barrier by one thread each, to the sums of the
// CTA. What lies beyond the ends of the table stays in registers till the end.
#pragma once

#include "cuda/kernels/attention/logit_bias.cuh"
#include "cuda/kernels/attention/table_sums.cuh"

namespace jagged_cuda::attention {

// In shared memory; behind it [kWarps][whole_sums()] whole numbers, and the sums
// [kWarps][time_buckets] and [position_buckets].
template <BiasKind kKind>
struct TableGradientStorage {
  static constexpr int kWarps = 4, kDiagonals = 16 + 64 - 1;
  // dS added up over rows and columns 8 further on: [column block less row block][row][column].
  // Those that 32 diagonals want, at a time.
  static constexpr int kPlanes = 9, kPlane = 8 * 8 + 8, kSomePlanes = 5;
  float planes[kWarps][kSomePlanes][kPlane];
  float diagonals[2][kWarps][kDiagonals + 1];
};
template <>
struct TableGradientStorage<BiasKind::kTimes> {
  static constexpr int kWarps = 4;
};

template <BiasKind kKind>
class TableGradients {
  using Storage = TableGradientStorage<kKind>;
  using Scores = Accumulator<1, 8>;
  using Bias = LogitBias<kKind, false>;

 public:
  // `sums` are those behind `shared`, full of zeros.
  __device__ __forceinline__ TableGradients(const ScoreBias& bias, Storage& shared, float* sums)
      : shared_(shared),
        whole_(reinterpret_cast<int*>(sums) + threadIdx.x / 32 * whole_sums(time_buckets(bias))),
        times_(sums + Storage::kWarps * whole_sums(time_buckets(bias)) +
               threadIdx.x / 32 * time_buckets(bias)),
        positions_(sums + Storage::kWarps * (whole_sums(time_buckets(bias)) + time_buckets(bias))) {
  }

  // What stands behind TableGradientStorage.
  __host__ __device__ __forceinline__ static int num_sums(int times, int positions) {
    return Storage::kWarps * (times + whole_sums(times)) + positions;
  }
  __host__ __device__ __forceinline__ static int num_sums(const ScoreBias& bias) {
    return num_sums(time_buckets(bias), position_buckets(bias));
  }

  __host__ __device__ __forceinline__ static int time_buckets(const ScoreBias& bias) {
    return bias.time_table == nullptr ? 0 : bias.time_buckets;
  }
  __host__ __device__ __forceinline__ static int position_buckets(const ScoreBias& bias) {
    return bias.position_table == nullptr ? 0 : bias.position_buckets;
  }

  // dS of the step from `column` on, 0 where a key is not seen, as in all of the groups of 16 columns
  // in `hidden`. It lacks the `factors` of the lane's rows. All threads.
  __device__ __forceinline__ void add(Bias& bias, Scores& ds, const float (&factors)[2],
                                      const typename Bias::Step& step, int column, unsigned hidden,
                                      int lane) {
    if constexpr (has_times(kKind)) {
      if (kKind == BiasKind::kTimes || bias.bias().time_table != nullptr)
        add_times(bias, ds, factors, step, column, hidden, lane);
    }
    if constexpr (has_positions(kKind)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) ds[0][i / 4][i % 4] *= factors[i % 4 / 2];
      if (kKind == BiasKind::kPositions || bias.bias().position_table != nullptr)
        add_positions(bias, ds, column, lane);
    }
  }

  // Behind the barrier that follows add(): the four warps' diagonals. All threads.
  __device__ __forceinline__ void merge() {
    if constexpr (has_positions(kKind)) merge_positions();
  }

  // Behind the last tile: the CTA's sums leave. All threads.
  __device__ __forceinline__ void finish(const AttentionBackwardParams& params, int lane) {
    const ScoreBias& bias = params.bias;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    __syncthreads();  // all sums of times are there, and the diagonals have been read
    float ends[2] = {};
    if constexpr (has_positions(kKind)) add_ends(ends, lane);
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
      if (i == 0) sum += ends[0];
      if (i == positions - 1) sum += ends[1];
      results.positions[i] = sum;
    }
  }

 private:
  static constexpr int kFewBuckets = 64, kCopiesLog2 = 3;
  __host__ __device__ __forceinline__ static int whole_sums(int times) {
    const int most = times > kFewBuckets << kCopiesLog2 ? times : kFewBuckets << kCopiesLog2;
    return times == 0 ? 0 : (most + 3) / 4 * 4;
  }

  __device__ __forceinline__ void merge_positions() {
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

  // What lies beyond the ends of the table, of all warps.
  __device__ __forceinline__ void add_ends(float (&ends)[2], int lane) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    float* of_warps = &shared_.diagonals[0][0][0];
    const float low = warp_sum(low_), high = warp_sum(high_);
    if (lane == 0) {
      of_warps[warp] = low;
      of_warps[Storage::kWarps + warp] = high;
    }
    __syncthreads();
    ends[0] = (of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3]);
    ends[1] = (of_warps[4] + of_warps[5]) + (of_warps[6] + of_warps[7]);
  }

  __device__ __forceinline__ static float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }
  // Of all, with their factors.
  __device__ __forceinline__ static float sum_of(const Scores& ds, float first, float second) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i % 4] += ds[0][i / 4][i % 4];
    return (sums[0] + sums[1]) * first + (sums[2] + sums[3]) * second;
  }

  __device__ __forceinline__ void add_positions(const Bias& bias, const Scores& ds, int column,
                                                int lane) {
    const int last = bias.bias().position_buckets - 1, farthest = bias.first_position(column);
    if (farthest <= 0) {
      low_ += sum_of(ds, 1.0f, 1.0f);
      return;
    }
    if (farthest - 126 >= last) {
      high_ += sum_of(ds, 1.0f, 1.0f);
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

  __device__ __forceinline__ void add_times(Bias& bias, const Scores& ds, const float (&factors)[2],
                                            const typename Bias::Step& step, int column,
                                            unsigned hidden, int lane) {
    constexpr unsigned kAll = 0xffffffffu;
    const int source = TimeGroups::place_of(column);  // found with the logits
    const TimeGroups& groups = bias.groups();
    const unsigned one = groups.one >> source, two = groups.two >> source,
                   narrow = groups.narrow >> source, ordered = groups.ordered >> source;
    const bool own = lane >= source && lane < source + 4 && (hidden >> (lane - source) & 1) == 0;
    const int lowest = __reduce_min_sync(kAll, own ? groups.first : INT_MAX),
              highest = __reduce_max_sync(kAll, own ? groups.last : 0);
    if (lowest >= highest) {
      const float sum = warp_sum(sum_of(ds, factors[0], factors[1]));
      if (lane == 0 && lowest < INT_MAX) times_[lowest] += sum;
      __syncwarp();
      return;
    }
    // What becomes whole numbers, so that their sums have no order: below 2^20 each.
    float largest[2] = {};  // NaN if one is
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& own = largest[i % 4 / 2];
      own = ptx::max_nan(own, fabsf(ds[0][i / 4][i % 4]));
    }
    // The bits of what is no number are above all numbers'.
    const float most = ptx::max_nan(largest[0] * fabsf(factors[0]), largest[1] * fabsf(factors[1]));
    const unsigned exponent =
        (__reduce_max_sync(kAll, __float_as_uint(most) & 0x7fffffffu) >> 23) + 1;
    const bool is_finite = exponent < 256;
    // 2^(20 + 127 - exponent), which a float can be, as its inverse.
    const unsigned power = is_finite ? min(20 + 2 * 127 - exponent, 253u) : 127;
    const float factor = __uint_as_float(power << 23);
    const float row_factors[2] = {factors[0] * factor, factors[1] * factor};
    // Of few buckets several copies, so that lanes seldom wait for each other.
    const int shift = highest - lowest < kFewBuckets ? kCopiesLog2 : 0, copies = 1 << shift;
    int* whole = whole_ + (lane & (copies - 1)) - (lowest << shift);
    const auto add = [&](int bucket, int value) {
      if (value != 0) atomicAdd(&whole[bucket << shift], value);
    };
    // A loop that stays one, since code that few steps run through would not stay in the cache.
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
      if (hidden >> group & 1) continue;
      float values[8];
      Bias::with_group(group, [&](auto constant) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          values[i] = ds[0][constant.value * 2 + i / 4][i % 4] * row_factors[i % 4 / 2];
      });
      const int first = __shfl_sync(kAll, groups.first, source + group);
      if (!is_finite || ((one | two | narrow) >> group & 1) == 0) {
#pragma unroll 1
        for (int element = 0; element < 8; ++element) {
          float value = values[0];
#pragma unroll
          for (int i = 1; i < 8; ++i) value = i == element ? values[i] : value;
          const int bucket = bias.look(group, element, column, lane).bucket;
          if (is_finite) {
            add(bucket, __float2int_rn(value));
          } else {
            add_by_bucket(times_, bucket, value);
          }
        }
      } else if (one >> group & 1) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += __float2int_rn(values[i]);
        add(first, sum);
      } else if (two >> group & 1) {
        int sum = 0, behind = 0;
        bias.for_each_side(group, bias.group(source + group), step, lane,
                           [&](int i, bool is_behind) {
                             const int value = __float2int_rn(values[i]);
                             sum += value;
                             behind += is_behind ? value : 0;
                           });
        add(first, sum - behind);
        add(first + 1, behind);
      } else {
        bias.for_each_distance(
            group, ordered >> group & 1, bias.group(source + group), step, lane,
            [&](int i, uint32_t away) {
              const TimeCell cell = bias.table().cell(away);
              add(static_cast<int>(cell.bucket) + (away >= cell.boundary ? 1 : 0),
                  __float2int_rn(values[i]));
            });
      }
    }
    const float unit = __uint_as_float((2 * 127 - power) << 23);
    __syncwarp();
#pragma unroll 1
    for (int bucket = lowest + lane; bucket <= highest; bucket += 32) {
      int* first = whole_ + ((bucket - lowest) << shift);
      int sum = first[0];
      if (shift == 0) {
        first[0] = 0;
      } else {
        auto* quads = reinterpret_cast<int4*>(first);
        const int4 one_quad = quads[0], other = quads[1];
        sum = (one_quad.x + one_quad.y) + (one_quad.z + one_quad.w) + (other.x + other.y) +
              (other.z + other.w);
        quads[0] = quads[1] = make_int4(0, 0, 0, 0);
      }
      times_[bucket] += static_cast<float>(sum) * unit;
    }
    __syncwarp();
  }

  Storage& shared_;
  int* whole_;                      // of the warp, zeros but within add_times()
  float* times_;                    // of the warp
  float* positions_;                // of the CTA
  float low_ = 0.0f, high_ = 0.0f;  // of this lane: of the first and the last bucket of positions
  bool pending_ = false;            // whether diagonals wait for merge()
  int stage_ = 0;                   // where those of the next step go
  int farthest_, last_;             // of them: bucket of diagonal 0, if there were as many
};

}  // namespace jagged_cuda::attention
