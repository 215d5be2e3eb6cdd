// What is added to scores (contract/score_bias.h), and the used part of key sequences: components
// of the schedules that take them.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

#include <climits>

namespace jagged_cuda::attention {

// The keys of a sequence that are used (AttentionParams::kv_lengths), out of `len`.
__device__ __forceinline__ int64_t used_keys(const AttentionParams& params, int64_t seq,
                                             int64_t len) {
  return params.kv_lengths.data == nullptr ? len : clamped_count(params.kv_lengths, seq, len);
}
__device__ __forceinline__ RowRange used_rows(const AttentionParams& params, int64_t seq) {
  RowRange kv = sequence_rows(params.kv_offsets, seq);
  kv.len = used_keys(params, seq, kv.len);
  return kv;
}

// |one - other|
__device__ __forceinline__ uint64_t time_between(int64_t one, int64_t other) {
  return static_cast<uint64_t>(one > other ? one : other) -
         static_cast<uint64_t>(one > other ? other : one);
}
// What boundaries are compared with.
__device__ __forceinline__ uint64_t time_away(const ScoreBias& bias, int64_t row_time,
                                              int64_t key_time) {
  return !bias.symmetric && row_time < key_time ? 0 : time_between(row_time, key_time);
}

// The biases of one head of one sequence. Rows and keys are counted within it, and must be there.
template <typename T>
struct HeadBias {
  const ScoreBias& bias;
  bool any;
  const T* keys;
  const T* times;
  const int64_t* q_time;
  const int64_t* kv_time;
  const T* positions;
  int64_t shift;  // Lk - Lq

  __device__ __forceinline__ HeadBias(const AttentionParams& params, int head,
                                      const RowRange& queries, const RowRange& kv)
      : bias(params.bias),
        any(params.bias.any()),
        keys(nullptr),
        times(nullptr),
        q_time(nullptr),
        kv_time(nullptr),
        positions(nullptr),
        shift(kv.len - queries.len) {
    if (bias.kv_bias != nullptr)
      keys = static_cast<const T*>(bias.kv_bias) + kv.begin * bias.kv_heads +
             head / (params.heads / bias.kv_heads);
    if (bias.time_table != nullptr) {
      times = static_cast<const T*>(bias.time_table) +
              head / (params.heads / bias.time_heads) * bias.time_buckets;
      q_time = bias.q_time + queries.begin;
      kv_time = bias.kv_time + kv.begin;
    }
    if (bias.position_table != nullptr)
      positions = static_cast<const T*>(bias.position_table) +
                  head / (params.heads / bias.position_heads) * bias.position_buckets;
  }

  // How many boundaries are at most `away`.
  __device__ __forceinline__ int bucket_of(uint64_t away) const {
    constexpr uint64_t kLargest = LLONG_MAX;
    const auto largest = static_cast<int64_t>(away < kLargest ? away : kLargest);
    int found = 0;
    for (int left = bias.time_buckets - 1; left > 0;) {
      const int half = left / 2;
      const bool passed = __ldg(bias.boundaries + found + half) <= largest;
      found = passed ? found + half + 1 : found;
      left = passed ? left - half - 1 : half;
    }
    return found;
  }
  __device__ __forceinline__ int time_bucket(int64_t row, int64_t key) const {
    return bucket_of(time_away(bias, __ldg(q_time + row), __ldg(kv_time + key)));
  }
  __device__ __forceinline__ int position_bucket(int64_t row, int64_t key) const {
    return bias.position_bucket(row + shift - key);
  }
  __device__ __forceinline__ T of(int64_t row, int64_t key) const {
    T sum = 0;
    if (keys != nullptr) sum += __ldg(keys + key * bias.kv_heads);
    if (times != nullptr) sum += __ldg(times + time_bucket(row, key));
    if (positions != nullptr) sum += __ldg(positions + position_bucket(row, key));
    return sum;
  }
};

// The buckets that the times of some rows and some keys can have, first to last, and the distance of
// the nearest two.
struct TimeRange {
  uint64_t nearest;
  uint64_t farthest;
  int first;
  int last;

  // Whether distances less the nearest one have 32 bits, and few boundaries lie between them.
  __device__ __forceinline__ bool is_narrow() const {
    constexpr int kFew = 12;
    return last - first <= kFew && farthest - nearest <= UINT_MAX;
  }
};

struct TimeSpan {
  int64_t soonest;
  int64_t latest;

  // Of `count` rows from `first` on, 1 at least. All 32 lanes of a warp together.
  __device__ __forceinline__ TimeSpan(const int64_t* times, int64_t first, int count)
      : soonest(LLONG_MAX), latest(LLONG_MIN) {
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int64_t time = __ldg(times + first + i);
      soonest = min(soonest, time);
      latest = max(latest, time);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      soonest = min(soonest, __shfl_xor_sync(0xffffffffu, soonest, distance));
      latest = max(latest, __shfl_xor_sync(0xffffffffu, latest, distance));
    }
  }
};

// Of `rows` queries from `row` on, and `keys` keys. All 32 lanes of a warp together.
template <typename T>
__device__ __forceinline__ TimeRange time_range(const HeadBias<T>& bias, int64_t row, int rows,
                                                int64_t key, int keys) {
  const TimeSpan query(bias.q_time, row, rows), other(bias.kv_time, key, keys);
  TimeRange range{};
  if (query.soonest > other.latest) range.nearest = time_between(query.soonest, other.latest);
  if (query.latest > other.soonest) range.farthest = time_between(query.latest, other.soonest);
  if (bias.bias.symmetric) {
    if (other.soonest > query.latest) range.nearest = time_between(other.soonest, query.latest);
    if (other.latest > query.soonest)
      range.farthest = max(range.farthest, time_between(other.latest, query.soonest));
  }
  range.first = bias.bucket_of(range.nearest);
  range.last = bias.bucket_of(range.farthest);
  return range;
}

// Rows of scores and columns of scores as queries and keys, or kTransposed as keys and queries. This
// lane's first row is `row`, its first column `column` + 2 (lane % 4); `rows` and `columns` is how
// many there are in the sequence.
template <bool kTransposed>
struct ScorePlace {
  int64_t row, rows, column, columns;
  int lane;

  __device__ __forceinline__ int64_t row_at(int r, int half) const {
    return min(row + 16 * r + 8 * half, rows - 1);
  }
  __device__ __forceinline__ int64_t column_at(int block, int i) const {
    return min(column + block * 8 + 2 * (lane % 4) + i, columns - 1);
  }
};

// Calls change(the score, its row, its column) for each score.
template <bool kTransposed, int kRowBlocks, int kBlocks, typename Change>
__device__ __forceinline__ void for_each_place(Accumulator<kRowBlocks, kBlocks>& s,
                                               const ScorePlace<kTransposed>& place,
                                               Change change) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = place.row_at(r, half);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          change(s[r][block][2 * half + i], row, place.column_at(block, i));
      }
    }
  }
}

template <bool kTransposed, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_key_bias(Accumulator<kRowBlocks, kBlocks>& s,
                                             const HeadBias<float>& bias,
                                             const ScorePlace<kTransposed>& place) {
  const int stride = bias.bias.kv_heads;
  if constexpr (kTransposed) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float added = __ldg(bias.keys + place.row_at(r, half) * stride);
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) s[r][i / 2][2 * half + i % 2] += added;
      }
    }
  } else {
    const float* g = bias.keys + place.column * stride;
    const int last = static_cast<int>(min(place.columns - place.column, int64_t{kBlocks * 8})) - 1;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float added = __ldg(g + min(block * 8 + 2 * (place.lane % 4) + i, last) * stride);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          s[r][block][i] += added;
          s[r][block][2 + i] += added;
        }
      }
    }
  }
}

template <bool kTransposed, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_position_bias(Accumulator<kRowBlocks, kBlocks>& s,
                                                  const HeadBias<float>& bias,
                                                  const ScorePlace<kTransposed>& place) {
  const int last = bias.bias.position_buckets - 1;
  constexpr int64_t kFar = 1 << 20;  // further than any bucket, whatever is added to it below
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = place.row + 16 * r + 8 * half,
                    column = place.column + 2 * (place.lane % 4),
                    away = (kTransposed ? column - row : row - column) + bias.shift -
                           bias.bias.position_first;
      const int index = static_cast<int>(max(min(away, kFar), -kFar));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int further = block * 8 + i;
          const int bucket = min(max(kTransposed ? index + further : index - further, 0), last);
          s[r][block][2 * half + i] += __ldg(bias.positions + bucket);
        }
      }
    }
  }
}

template <bool kTransposed, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_time_bias(Accumulator<kRowBlocks, kBlocks>& s,
                                              const HeadBias<float>& bias,
                                              const ScorePlace<kTransposed>& place) {
  // What the whole warp has, whose first row is that of lane 0.
  const int64_t first_row = place.row - place.lane / 4;
  const int rows = static_cast<int>(
                max(min(place.rows - first_row, int64_t{kRowBlocks * 16}), int64_t{0})),
            columns = static_cast<int>(min(place.columns - place.column, int64_t{kBlocks * 8}));
  if (rows == 0) return;
  const TimeRange range = kTransposed ? time_range(bias, place.column, columns, first_row, rows)
                                      : time_range(bias, first_row, rows, place.column, columns);
  if (range.first == range.last) {
    const float added = __ldg(bias.times + range.first);
    for_each_score(s, [&](float& score) { score += added; });
    return;
  }
  if (!range.is_narrow()) {
    for_each_place(s, place, [&](float& score, int64_t row, int64_t column) {
      score += __ldg(bias.times +
                     (kTransposed ? bias.time_bucket(column, row) : bias.time_bucket(row, column)));
    });
    return;
  }
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint32_t away[kBlocks * 2];
      float added[kBlocks * 2];
      const int64_t* row_times = kTransposed ? bias.kv_time : bias.q_time;
      const int64_t* column_times = kTransposed ? bias.q_time : bias.kv_time;
      const int64_t time = __ldg(row_times + place.row_at(r, half));
#pragma unroll
      for (int i = 0; i < kBlocks * 2; ++i) {
        const int64_t other = __ldg(column_times + place.column_at(i / 2, i % 2));
        away[i] = static_cast<uint32_t>(
            (kTransposed ? time_away(bias.bias, other, time) : time_away(bias.bias, time, other)) -
            range.nearest);
        added[i] = __ldg(bias.times + range.first);
      }
      for (int bucket = range.first; bucket < range.last; ++bucket) {
        const int64_t boundary = __ldg(bias.bias.boundaries + bucket);
        const auto next = static_cast<uint32_t>(static_cast<uint64_t>(boundary) - range.nearest);
        const float value = __ldg(bias.times + bucket + 1);
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) added[i] = away[i] >= next ? value : added[i];
      }
#pragma unroll
      for (int i = 0; i < kBlocks * 2; ++i) {
        if (half == 0) {
          s[r][i / 2][i % 2] += added[i];
        } else {
          s[r][i / 2][2 + i % 2] += added[i];
        }
      }
    }
  }
}

// Scores become logits, scale * score + bias.
template <bool kTransposed, int kRowBlocks, int kBlocks>
__device__ __forceinline__ void scale_and_bias(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                               const HeadBias<float>& bias,
                                               const ScorePlace<kTransposed>& place) {
  // Not fused with what is added, which is looked up in ways that depend on the tile.
  for_each_score(s, [&](float& score) { score = __fmul_rn(score, scale); });
  if (!bias.any) return;
  if (bias.keys != nullptr) add_key_bias(s, bias, place);
  if (bias.times != nullptr) add_time_bias(s, bias, place);
  if (bias.positions != nullptr) add_position_bias(s, bias, place);
}

// --- the gradients of kv_bias

// Adds up rows of dS^T.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_rows(const Accumulator<kRowBlocks, kBlocks>& ds,
                                         float (&sums)[kRowBlocks][2]) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) sums[r][i % 4 / 2] += ds[r][i / 4][i % 4];
  }
}

// Writes the sums of a head, and begins anew. `rows` are those of the tile at global_row.
template <int kRowBlocks>
__device__ __forceinline__ void store_key_sums(const AttentionBackwardParams& params,
                                               float (&sums)[kRowBlocks][2], int64_t global_row,
                                               int warp_row, int rows, int head, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[r][half]);
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows)
        static_cast<float*>(params.key_sums)[(global_row + row) * params.heads + head] = sum;
      sums[r][half] = 0.0f;
    }
  }
}

// --- the gradients of tables

// dS of 16 rows of a warp, to be added up along diagonals.
template <int kColumns>
using Diagonals = float[16][kColumns + 1];

// The sums of a warp, of its own: nothing else reads or writes them.
template <typename T>
struct TableSums {
  T* times;      // [time_buckets]
  T* positions;  // [position_buckets]

  // Those of warp `warp` and head `head`, out of all in params.table_sums: [warps, H, buckets].
  __device__ __forceinline__ TableSums(const AttentionBackwardParams& params, int64_t warp,
                                       int head) {
    const ScoreBias& bias = params.bias;
    const int64_t line = warp * params.heads + head;
    times = bias.time_table == nullptr
                ? nullptr
                : static_cast<T*>(params.time_sums) + line * bias.time_buckets;
    positions = bias.position_table == nullptr
                    ? nullptr
                    : static_cast<T*>(params.position_sums) + line * bias.position_buckets;
  }

  // Adds dS of 16 rows of a warp and kBlocks * 8 keys, 0 where a key is not seen; `diagonals` is the
  // warp's own.
  template <int kBlocks>
  __device__ __forceinline__ void add(const HeadBias<T>& bias, Accumulator<1, kBlocks>& ds,
                                      const ScorePlace<false>& place,
                                      Diagonals<kBlocks * 8>& diagonals) {
    if (times != nullptr) add_times(bias, ds, place);
    if (positions != nullptr) add_positions(bias, ds, place, diagonals);
  }

  // Adds one dS per lane, 0 where a key is not seen. All 32 lanes together.
  __device__ __forceinline__ void add(const HeadBias<T>& bias, int64_t row, int64_t key, T value) {
    if (times != nullptr) add_to(times, bias.time_bucket(row, key), value);
    if (positions != nullptr) add_to(positions, bias.position_bucket(row, key), value);
  }

 private:
  template <int kBlocks>
  __device__ __forceinline__ void add_times(const HeadBias<T>& bias, Accumulator<1, kBlocks>& ds,
                                            const ScorePlace<false>& place) {
    const int64_t first_row = place.row - place.lane / 4;
    const int rows = static_cast<int>(max(min(place.rows - first_row, int64_t{16}), int64_t{0})),
              columns = static_cast<int>(min(place.columns - place.column, int64_t{kBlocks * 8}));
    if (rows == 0) return;
    const TimeRange range = time_range(bias, first_row, rows, place.column, columns);
    if (range.first == range.last) {
      T sum = 0;
      for_each_score(ds, [&](T& each) { sum += each; });
      add_from_all(times + range.first, sum, place.lane);
      return;
    }
    if (!range.is_narrow()) {
      for_each_place(ds, place, [&](T& each, int64_t row, int64_t column) {
        add_to(times, bias.time_bucket(row, column), each);
      });
      return;
    }
    uint32_t away[kBlocks * 4];
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const int64_t time = __ldg(bias.q_time + place.row_at(0, i % 4 / 2)),
                    other = __ldg(bias.kv_time + place.column_at(i / 4, i % 2));
      away[i] = static_cast<uint32_t>(time_away(bias.bias, time, other) - range.nearest);
    }
    uint32_t from = 0;
    for (int bucket = range.first; bucket <= range.last; ++bucket) {
      const bool is_last = bucket == range.last;
      const uint32_t next =
          is_last
              ? 0
              : static_cast<uint32_t>(static_cast<uint64_t>(__ldg(bias.bias.boundaries + bucket)) -
                                      range.nearest);
      T sum = 0;
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        const bool inside = away[i] >= from && (is_last || away[i] < next);
        sum += inside ? ds[0][i / 4][i % 4] : T(0);
      }
      add_from_all(times + bucket, sum, place.lane);
      from = next;
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void add_positions(const HeadBias<T>& bias,
                                                Accumulator<1, kBlocks>& ds,
                                                const ScorePlace<false>& place,
                                                Diagonals<kBlocks * 8>& diagonals) {
    constexpr int kColumns = kBlocks * 8, kDiagonals = 16 + kColumns - 1;
    const int64_t first_row = place.row - place.lane / 4;
    // Of the first diagonal: row 0 and the last column.
    const int64_t nearest = first_row + bias.shift - (place.column + kColumns - 1);
    const int first = bias.bias.position_bucket(nearest),
              last = bias.bias.position_bucket(nearest + kDiagonals - 1);
    if (first == last) {
      T sum = 0;
      for_each_score(ds, [&](T& each) { sum += each; });
      add_from_all(positions + first, sum, place.lane);
      return;
    }
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i)
      diagonals[place.lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + 2 * (place.lane % 4) + i % 2] =
          ds[0][i / 4][i % 4];
    __syncwarp();
#pragma unroll
    for (int diagonal = place.lane; diagonal < (kDiagonals + 31) / 32 * 32; diagonal += 32) {
      T sum = 0;
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        const int column = row + kColumns - 1 - diagonal;
        if (column >= 0 && column < kColumns) sum += diagonals[row][column];
      }
      add_to(positions, bias.bias.position_bucket(nearest + diagonal), sum);
    }
  }

  // One number per lane; all 32 together.
  __device__ __forceinline__ static void add_from_all(T* sum, T value, int lane) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (lane == 0) *sum += value;
    __syncwarp();
  }

  // Lanes of the same bucket add up in a tree that their numbers alone decide, so that the same
  // values give the same bits.
  __device__ __forceinline__ static void add_to(T* sums, int bucket, T value) {
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
};

}  // namespace jagged_cuda::attention
