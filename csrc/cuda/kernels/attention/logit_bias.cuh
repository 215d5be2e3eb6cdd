// What is added to the scores of tiles of 64 by 64 on wgmma (ranged_backward.cuh): kv_bias alone,
// position_bias alone, or any of them and time_bias, found at run time. Rows and columns of scores are
// queries and keys, or kTransposed keys and queries; a warp has 16 rows, and the columns come in steps.
//
// What a step brings is copied to shared memory with its operands; each thread scales what it has
// copied itself, so that a score becomes a logit in the wanted unit (kLog2E for softmax) by one
// multiplication and addition for the first bias and an addition for each other. A value of
// position_bias belongs to a diagonal of the tile.
//
// Buckets of times are found for 32 groups of 16 columns at once, a group to each lane: which buckets
// its columns and the warp's rows can have. Mostly that is one, whose value serves the group.
#pragma once

#include "cuda/kernels/attention/bias.cuh"

namespace jagged_cuda::attention {

enum class BiasKind { kNone, kKeys, kPositions, kAny };

// Of each diagonal, which is column - row + 63, its value. Twice, the second time one further on, so
// that of every row the diagonals of columns 2 c and 2 c + 1 lie in one aligned pair; 16 banks apart.
using DiagonalValues = float[2][128 + 16];

// What a step brings.
template <BiasKind kKind>
struct LogitStep {};
template <>
struct LogitStep<BiasKind::kKeys> {
  alignas(16) float keys[64];  // not kTransposed
};
template <>
struct LogitStep<BiasKind::kPositions> {
  alignas(16) DiagonalValues positions;
};
template <>
struct LogitStep<BiasKind::kAny> {
  alignas(16) int64_t times[64];
  alignas(16) float keys[64];  // not kTransposed
  alignas(16) DiagonalValues positions;
};

// What each lane has of its two rows where they are keys, in shared memory, since registers are few.
template <BiasKind kKind>
struct KeyOfLane {
  alignas(16) float bias[2];  // kv_bias, in the unit of logits
  float sums[2];              // of its gradient

  // Adds up rows of dS^T.
  __device__ __forceinline__ void add(const Accumulator<1, 8>& ds) {
    float2 all = *reinterpret_cast<const float2*>(sums);
#pragma unroll
    for (int i = 0; i < 32; ++i) (i % 4 / 2 == 0 ? all.x : all.y) += ds[0][i / 4][i % 4];
    *reinterpret_cast<float2*>(sums) = all;
  }
  __device__ __forceinline__ void take_sums(float (&taken)[1][2], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) taken[0][half] = sums[half] * factor;
  }
};
template <>
struct KeyOfLane<BiasKind::kNone> {};
template <>
struct KeyOfLane<BiasKind::kPositions> {};

// Which buckets the times between a warp's rows and 32 groups of 16 columns have.
class TimeGroups {
 public:
  static constexpr int kColumns = 16, kWindow = 32 * kColumns;
  static constexpr uint64_t kNarrow = uint64_t{1} << 31;

  // Of this lane's group: the buckets of its nearest and its farthest time, the value of the first in
  // the unit of logits, the boundary behind it, and the value behind that.
  int first;
  int last;
  float value;
  uint32_t boundary;
  float behind;
  // The nearest distance of a group whose queries are all later than its keys, else 0: from it on
  // distances are counted, modulo 2^32, `boundary` too.
  uint32_t nearest;
  // Groups with one bucket; those with one boundary; those whose distances are exact in 32 bits; and
  // those whose queries are all later than its keys.
  unsigned one;
  unsigned two;
  unsigned narrow;
  unsigned ordered;

  // Forgets what it knows: of another head.
  __device__ __forceinline__ void reset() { window_ = -1; }

  // Finds the groups of the step from `column` on, and returns the lane that has its first. All 32
  // lanes of a warp together.
  template <bool kTransposed>
  __device__ __forceinline__ int find(const ScoreBias& bias, const float* table, float unit,
                                      const TimeSpan& rows, const int64_t* gTimes, int num_columns,
                                      int column) {
    constexpr unsigned kAll = 0xffffffffu;
    if (column / kWindow != window_) {
      window_ = column / kWindow;
      const int begin = window_ * kWindow + static_cast<int>(threadIdx.x) % 32 * kColumns;
      TimeSpan columns;
#pragma unroll 4
      for (int i = 0; i < kColumns; ++i)
        columns.include(__ldg(gTimes + min(begin + i, num_columns - 1)));
      const TimeRange range =
          kTransposed ? TimeRange(bias, columns, rows) : TimeRange(bias, rows, columns);
      first = range.first;
      last = range.last;
      value = __ldg(table + first) * unit;
      const TimeSpan &queries = kTransposed ? columns : rows, &keys = kTransposed ? rows : columns;
      const bool in_order = queries.soonest >= keys.latest;
      const uint64_t least = in_order ? time_between(queries.soonest, keys.latest) : 0;
      nearest = static_cast<uint32_t>(least);
      boundary = 0;
      behind = value;
      if (first < last) {
        boundary = boundary_behind(bias, first, nearest);
        behind = __ldg(table + first + 1) * unit;
      }
      one = __ballot_sync(kAll, first == last);
      two = __ballot_sync(kAll, first + 1 == last);
      const bool is_exact = in_order
                                ? time_between(queries.latest, keys.soonest) - least < kNarrow
                                : time_between(max(rows.latest, columns.latest),
                                               min(rows.soonest, columns.soonest)) < kNarrow / 2;
      narrow = __ballot_sync(kAll, is_exact);
      ordered = __ballot_sync(kAll, in_order);
    }
    return column % kWindow / kColumns;
  }

  // The boundary behind bucket `bucket`, as distances are counted.
  __device__ __forceinline__ static uint32_t boundary_behind(const ScoreBias& bias, int bucket,
                                                             uint32_t nearest) {
    return static_cast<uint32_t>(__ldg(bias.boundaries + bucket)) - nearest;
  }

 private:
  int window_ = -1;
};

template <BiasKind kKind, bool kTransposed>
class LogitBias {
  static constexpr int kRows = 64, kColumns = 64, kThreads = 128, kBlocks = kColumns / 8;
  static constexpr bool kAny = kKind == BiasKind::kAny;
  static constexpr bool kKeys = kAny || kKind == BiasKind::kKeys;
  static constexpr bool kPositions = kAny || kKind == BiasKind::kPositions;

 public:
  using Step = LogitStep<kKind>;
  using Scores = Accumulator<1, kBlocks>;
  using Keys = KeyOfLane<kTransposed ? kKind : BiasKind::kNone>;

  // Of a tile from row `row` of its sequence on, of which `queries` and `kv` are the rows. All 32
  // lanes of a warp together.
  __device__ __forceinline__ LogitBias(const AttentionParams& params, const RowRange& queries,
                                       const RowRange& kv, int row, int warp_row, float unit)
      : params_(params), queries_(queries), kv_(kv), row_(row), warp_row_(warp_row), unit_(unit) {
    if constexpr (kAny) {
      if (bias().time_table == nullptr) return;
      for_each_row([&](int half, int own) {
        const int64_t time = __ldg(times_of_rows() + own);
        row_times_[half] = static_cast<uint32_t>(time);
        span_.include(time);
      });
      span_.combine();
    }
  }

  // What add() is for from now on.
  __device__ __forceinline__ void set_head(int head, Keys& keys) {
    if constexpr (kTransposed && kKeys) {
      if (has_keys()) {
        const float* g = key_column(head);
        for_each_row([&](int half, int own) {
          keys.bias[half] = __ldg(g + int64_t{own} * bias().kv_heads) * unit_;
          keys.sums[half] = 0.0f;
        });
      }
    }
    if constexpr (kAny) {
      if (bias().time_table != nullptr) {
        times_ = static_cast<const float*>(bias().time_table) +
                 head / (params_.heads / bias().time_heads) * bias().time_buckets;
        groups_.reset();
      }
    }
  }

  // What load() is for from now on.
  __device__ __forceinline__ void set_load_head(int head) {
    if constexpr (!kTransposed && kKeys) {
      if (has_keys()) load_keys_ = key_column(head);
    }
    if constexpr (kPositions) {
      if (has_positions())
        load_positions_ = static_cast<const float*>(bias().position_table) +
                          head / (params_.heads / bias().position_heads) * bias().position_buckets;
    }
  }

  // Copies the step from `column` on, of which some columns are there; the caller commits and waits.
  __device__ __forceinline__ void load(Step& step, int column) const {
    const int own = static_cast<int>(threadIdx.x), last = num_columns() - 1;
    if constexpr (!kTransposed && kKeys) {
      if (own < kColumns && has_keys())
        ptx::cp_async_4(&step.keys[own],
                        load_keys_ + int64_t{min(column + own, last)} * bias().kv_heads, 4);
    }
    static_assert(kThreads == 2 * kColumns && kThreads == kRows + kColumns);
    if constexpr (kAny) {
      if (bias().time_table != nullptr) {
        const int64_t* time = times_of_columns() + min(column + own / 2, last);
        ptx::cp_async_4(reinterpret_cast<int*>(step.times) + own,
                        reinterpret_cast<const int*>(time) + own % 2, 4);
      }
    }
    if constexpr (kPositions) {
      if (has_positions()) {
        const int bucket = bucket_of_distance(distance_of(own, column));
        if (own > 0 && has_one_position(column)) return;
        ptx::cp_async_4(&step.positions[0][own], load_positions_ + bucket, 4);
        ptx::cp_async_4(&step.positions[1][own + 1], load_positions_ + bucket, 4);
      }
    }
  }

  // Behind the wait for a step, and before the barrier: each thread scales what it has copied.
  __device__ __forceinline__ void finish_load(Step& step, int column) const {
    const int own = static_cast<int>(threadIdx.x);
    if constexpr (!kTransposed && kKeys) {
      if (own < kColumns && has_keys()) step.keys[own] *= unit_;
    }
    if constexpr (kPositions) {
      if (has_positions()) {
        if (own > 0 && has_one_position(column)) return;
        const float value = step.positions[0][own] * unit_;
        step.positions[0][own] = value;
        step.positions[1][own + 1] = value;
      }
    }
  }

  // Scores become logits: `scale` has the unit in it. `column` is the first of the step.
  __device__ __forceinline__ void scale_and_add(Scores& s, float scale, const Step& step,
                                                const Keys& keys, int column, int lane) {
    if constexpr (kKind == BiasKind::kKeys) {
      add_keys(s, scale, step, keys, lane);
    } else if constexpr (kKind == BiasKind::kPositions) {
      add_positions(s, scale, step, column, lane);
    } else if constexpr (kAny) {
      if (has_positions()) {
        add_positions(s, scale, step, column, lane);
        scale = 1.0f;
      }
      if (bias().kv_bias != nullptr) {
        add_keys(s, scale, step, keys, lane);
        scale = 1.0f;
      }
      if (bias().time_table != nullptr) add_times(s, scale, step, column, lane);
    }
  }

  // --- for the gradients of tables (table_gradients.cuh)

  __device__ __forceinline__ const ScoreBias& bias() const { return params_.bias; }
  // How far row and column of a diagonal of the tile and the step from `column` on are apart.
  __device__ __forceinline__ int distance_of(int diagonal, int column) const {
    const int shift = static_cast<int>(kv_.len - queries_.len), away = diagonal - (kRows - 1);
    return kTransposed ? column - row_ + shift + away : row_ - column + shift - away;
  }
  // Finds the groups of a step, and returns the lane that has its first.
  __device__ __forceinline__ int find_groups(int column) {
    return groups_.template find<kTransposed>(bias(), times_, unit_, span_, times_of_columns(),
                                              num_columns(), column);
  }
  __device__ __forceinline__ const TimeGroups& groups() const { return groups_; }

  // The distances of the lane's scores in a group of a step, of which `lane_of_group` knows, and what
  // they are counted from; they are exact in 32 bits.
  __device__ __forceinline__ uint32_t distances(uint32_t (&away)[8], int group, int lane_of_group,
                                                const Step& step, int lane) const {
    const uint32_t nearest = __shfl_sync(0xffffffffu, groups_.nearest, lane_of_group);
    const uint32_t rows[2] = {kTransposed ? row_times_[0] + nearest : row_times_[0] - nearest,
                              kTransposed ? row_times_[1] + nearest : row_times_[1] - nearest};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const auto pair =
          *reinterpret_cast<const uint4*>(&step.times[group * 16 + b * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t other = i % 2 == 0 ? pair.x : pair.z, row = rows[i / 2];
        away[b * 4 + i] = kTransposed ? other - row : row - other;
      }
    }
    if (groups_.ordered >> lane_of_group & 1) return nearest;
    const int mirrored = bias().symmetric ? -1 : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto difference = static_cast<int>(away[i]);
      away[i] = static_cast<uint32_t>(max(difference, difference * mirrored));
    }
    return nearest;
  }

  // The bucket of one score, whatever its times.
  __device__ __forceinline__ int time_bucket(int block, int i, int column, int lane) const {
    const int row = own_row(i / 2, lane),
              other = min(column + block * 8 + 2 * (lane % 4) + i % 2, num_columns() - 1);
    const int64_t row_time = __ldg(times_of_rows() + row), time = __ldg(times_of_columns() + other);
    const int64_t query = kTransposed ? time : row_time, key = kTransposed ? row_time : time;
    const uint64_t away = !bias().symmetric && query < key ? 0 : time_between(query, key);
    return bucket_of(bias(), away, 0, bias().time_buckets - 1);
  }

 private:
  __device__ __forceinline__ bool has_keys() const {
    return kKind == BiasKind::kKeys || bias().kv_bias != nullptr;
  }
  __device__ __forceinline__ bool has_positions() const {
    return kKind == BiasKind::kPositions || bias().position_table != nullptr;
  }
  __device__ __forceinline__ int num_rows() const {
    return static_cast<int>(kTransposed ? kv_.len : queries_.len);
  }
  __device__ __forceinline__ int num_columns() const {
    return static_cast<int>(kTransposed ? queries_.len : kv_.len);
  }
  __device__ __forceinline__ const int64_t* times_of_rows() const {
    return kTransposed ? bias().kv_time + kv_.begin : bias().q_time + queries_.begin;
  }
  __device__ __forceinline__ const int64_t* times_of_columns() const {
    return kTransposed ? bias().q_time + queries_.begin : bias().kv_time + kv_.begin;
  }
  __device__ __forceinline__ const float* key_column(int head) const {
    return static_cast<const float*>(bias().kv_bias) + kv_.begin * bias().kv_heads +
           head / (params_.heads / bias().kv_heads);
  }
  // The lane's rows in the sequence, or the last one there is.
  __device__ __forceinline__ int own_row(int half, int lane) const {
    return min(row_ + warp_row_ + 8 * half + lane / 4, num_rows() - 1);
  }
  template <typename Visit>
  __device__ __forceinline__ void for_each_row(Visit visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visit(half, own_row(half, static_cast<int>(threadIdx.x) % 32));
  }
  __device__ __forceinline__ int bucket_of_distance(int distance) const {
    constexpr int64_t kFar = int64_t{1} << 29;  // more than any distance
    const int first = static_cast<int>(max(min(bias().position_first, kFar), -kFar));
    return max(min(distance - first, bias().position_buckets - 1), 0);
  }

  __device__ __forceinline__ void add_keys(Scores& s, float scale, const Step& step,
                                           const Keys& keys, int lane) const {
    float2 of_rows;
    if constexpr (kTransposed) of_rows = *reinterpret_cast<const float2*>(keys.bias);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float2 added;
      if constexpr (!kTransposed)
        added = *reinterpret_cast<const float2*>(&step.keys[block * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool first = (kTransposed ? i / 2 : i % 2) == 0;
        const float2& two = kTransposed ? of_rows : added;
        s[0][block][i] = __fmaf_rn(s[0][block][i], scale, first ? two.x : two.y);
      }
    }
  }

  // Whether all diagonals of a step lie beyond the same end of the table: then the first alone is
  // copied.
  __device__ __forceinline__ bool has_one_position(int column) const {
    const int ends[2] = {distance_of(0, column), distance_of(kRows + kColumns - 2, column)};
    const int nearest = bucket_of_distance(ends[kTransposed ? 0 : 1]),
              farthest = bucket_of_distance(ends[kTransposed ? 1 : 0]);
    return nearest == farthest;
  }
  __device__ __forceinline__ void add_positions(Scores& s, float scale, const Step& step,
                                                int column, int lane) const {
    if (has_one_position(column)) {
      const float added = step.positions[0][0];
      for_each_score(s, [&](float& score) { score = __fmaf_rn(score, scale, added); });
      return;
    }
    const int diagonal = 2 * (lane % 4) - warp_row_ - lane / 4 + kRows - 1, copy = diagonal % 2;
    const float* pairs = &step.positions[copy][diagonal + copy];
    // Rows and columns 8 further on have the same diagonals.
#pragma unroll
    for (int step8 = -1; step8 < kBlocks; ++step8) {
      const float2 added = *reinterpret_cast<const float2*>(pairs + 8 * step8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = step8 + half;
        if (block < 0 || block >= kBlocks) continue;
        float* two = &s[0][block][half * 2];
        two[0] = __fmaf_rn(two[0], scale, added.x);
        two[1] = __fmaf_rn(two[1], scale, added.y);
      }
    }
  }

  __device__ __forceinline__ void add_times(Scores& s, float scale, const Step& step, int column,
                                            int lane) {
    constexpr unsigned kAll = 0xffffffffu, kOfStep = 0xf;
    const int source = find_groups(column);
    const unsigned one = groups_.one >> source & kOfStep,
                   narrow = groups_.narrow >> source & kOfStep;
    if ((one | narrow) != kOfStep) {  // one score after another, of all in registers
#pragma unroll 1
      for (int element = 0; element < kBlocks * 4; ++element) {
        const float added =
            __ldg(times_ + time_bucket(element / 4, element % 4, column, lane)) * unit_;
#pragma unroll
        for (int e = 0; e < kBlocks * 4; ++e) {
          if (e == element) s[0][e / 4][e % 4] = __fmaf_rn(s[0][e / 4][e % 4], scale, added);
        }
      }
      return;
    }
    if (one == kOfStep) {  // in a row, so that their latencies overlap
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const float added = __shfl_sync(kAll, groups_.value, source + group);
        float (*own)[4] = &s[0][group * 2];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = __fmaf_rn(own[i / 4][i % 4], scale, added);
      }
      return;
    }
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const float nearest = __shfl_sync(kAll, groups_.value, source + group);
      float (*own)[4] = &s[0][group * 2];
      if (one >> group & 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          own[i / 4][i % 4] = __fmaf_rn(own[i / 4][i % 4], scale, nearest);
        continue;
      }
      uint32_t away[8];
      float found[8];
      const uint32_t from = distances(away, group, source + group, step, lane);
      const uint32_t boundary = __shfl_sync(kAll, groups_.boundary, source + group);
      const float behind = __shfl_sync(kAll, groups_.behind, source + group);
#pragma unroll
      for (int i = 0; i < 8; ++i) found[i] = away[i] >= boundary ? behind : nearest;
      if ((groups_.two >> (source + group) & 1) == 0) {
        const int first = __shfl_sync(kAll, groups_.first, source + group),
                  last = __shfl_sync(kAll, groups_.last, source + group);
        // Asked for one boundary ahead.
        uint32_t next_boundary = TimeGroups::boundary_behind(bias(), first + 1, from);
        float next_value = __ldg(times_ + first + 2);
#pragma unroll 1
        for (int next = first + 1; next < last; ++next) {
          const uint32_t farther = next_boundary;
          const float value = next_value * unit_;
          const int after = min(next + 1, last - 1);
          next_boundary = TimeGroups::boundary_behind(bias(), after, from);
          next_value = __ldg(times_ + after + 1);
#pragma unroll
          for (int i = 0; i < 8; ++i) found[i] = away[i] >= farther ? value : found[i];
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = __fmaf_rn(own[i / 4][i % 4], scale, found[i]);
    }
  }

  const AttentionParams& params_;
  RowRange queries_;
  RowRange kv_;
  int row_;
  int warp_row_;
  float unit_;
  const float* load_keys_;       // kv_bias of the head that is loaded; not kTransposed
  const float* load_positions_;  // [position_buckets] of that head
  const float* times_;           // [time_buckets] of the head
  uint32_t row_times_[2];        // of the lane's rows, the lower half
  TimeSpan span_;                // of the warp's rows
  TimeGroups groups_;
};

}  // namespace jagged_cuda::attention
