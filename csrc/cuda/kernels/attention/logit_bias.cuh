// What is added to the scores of tiles of 64 by 64 on wgmma (ranged_backward.cuh): kv_bias alone,
// position_bias alone, time_bias alone, or any of them, found at run time. Rows and columns of scores are
// queries and keys, or kTransposed keys and queries; a warp has 16 rows, and the columns come in steps.
//
// What a step brings comes to shared memory with its operands; each thread scales what it has loaded
// itself, so that a score becomes a logit in the wanted unit (kLog2E for softmax) by one multiplication
// and addition for the first bias and an addition for each other. A value of position_bias belongs to
// a diagonal of the tile; lanes read theirs from a table with margins (PositionTable), which L1 caches.
//
// Times are looked at for a warp's 16 rows and 16 columns at once (TimeGroups): one value, one
// comparison with a boundary, or a look at a cell of the table (time_tiles.cuh). A step with a group
// for which none of these serves, such as of unsorted times further apart than 2^31, takes one score
// after another.
#pragma once

#include "cuda/kernels/attention/bias.cuh"
#include "cuda/kernels/attention/time_tiles.cuh"

namespace jagged_cuda::attention {

enum class BiasKind { kNone, kKeys, kPositions, kTimes, kAny };

// What may be among them.
constexpr bool has_key_bias(BiasKind kind) {
  return kind == BiasKind::kKeys || kind == BiasKind::kAny;
}
constexpr bool has_positions(BiasKind kind) {
  return kind == BiasKind::kPositions || kind == BiasKind::kAny;
}
constexpr bool has_times(BiasKind kind) {
  return kind == BiasKind::kTimes || kind == BiasKind::kAny;
}

// That of a call.
inline BiasKind bias_kind(const ScoreBias& bias) {
  const bool keys = bias.kv_bias != nullptr, times = bias.time_table != nullptr,
             positions = bias.position_table != nullptr;
  if (keys + times + positions > 1) return BiasKind::kAny;
  return keys        ? BiasKind::kKeys
         : times     ? BiasKind::kTimes
         : positions ? BiasKind::kPositions
                     : BiasKind::kNone;
}

// What a step brings.
template <BiasKind kKind>
struct LogitStep {};
template <>
struct LogitStep<BiasKind::kKeys> {
  alignas(16) float keys[64];  // not kTransposed
};
template <>
struct LogitStep<BiasKind::kTimes> {
  alignas(16) uint32_t times[64];  // TimeTiles::before_latest or behind_soonest
};
template <>
struct LogitStep<BiasKind::kAny> {
  alignas(16) uint32_t times[64];
  alignas(16) float keys[64];  // not kTransposed
};

// What all steps of a head share.
template <BiasKind kKind>
struct LogitTable {};
template <>
struct LogitTable<BiasKind::kTimes> {
  TimeTable times;
  TimeSource source;
  TimeGroup groups[4][32];  // of each warp
};
template <>
struct LogitTable<BiasKind::kAny> : LogitTable<BiasKind::kTimes> {};

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
template <>
struct KeyOfLane<BiasKind::kTimes> {};

template <BiasKind kKind, bool kTransposed>
class LogitBias {
  static constexpr int kRows = 64, kColumns = 64, kThreads = 128, kBlocks = kColumns / 8,
                       kDiagonals = kRows + kColumns - 1;
  static constexpr bool kKeys = has_key_bias(kKind);
  static constexpr bool kPositions = attention::has_positions(kKind);
  static constexpr bool kTimes = attention::has_times(kKind);

 public:
  using Step = LogitStep<kKind>;
  using Scores = Accumulator<1, kBlocks>;
  using Keys = KeyOfLane<kTransposed ? kKind : BiasKind::kNone>;

  // Of a tile from row `row` of its sequence on, of which `queries` and `kv` are the rows. All 32
  // lanes of a warp together.
  __device__ __forceinline__ LogitBias(const AttentionBackwardParams& params, int64_t seq,
                                       const RowRange& queries, const RowRange& kv, int row,
                                       int warp_row, float unit, LogitTable<kKind>& table)
      : params_(params),
        queries_(queries),
        kv_(kv),
        row_(row),
        warp_row_(warp_row),
        unit_(unit),
        table_(table) {
    if constexpr (kPositions) {
      constexpr int64_t kFar = int64_t{1} << 29;  // more than any distance
      const int shift = static_cast<int>(kv.len - queries.len),
                first = static_cast<int>(max(min(bias().position_first, kFar), -kFar));
      // The queries and keys of diagonal 0 are the nearest if kTransposed, else the farthest.
      first_diagonal_ = (kTransposed ? shift - row - (kRows - 1) : row + shift + kRows - 1) - first;
      const int lane = static_cast<int>(threadIdx.x) % 32,
                diagonal = 2 * (lane % 4) - warp_row - lane / 4 + kRows - 1;
      own_position_ = PositionTable::kMargin + (kTransposed ? diagonal : -diagonal - 1);
    }
    if constexpr (kTimes) {
      if (!has_times()) return;
      const TimeTiles tiles(params);
      const TimeSpan* of_queries = tiles.queries + TimeTiles::block_of_rows(queries.begin, seq, 0);
      const TimeSpan* of_keys = tiles.keys + TimeTiles::block_of_rows(kv.begin, seq, 0);
      const int64_t *q_time = bias().q_time + queries.begin, *kv_time = bias().kv_time + kv.begin;
      const uint32_t *of_query = tiles.behind_soonest + queries.begin,
                     *of_key = tiles.before_latest + kv.begin;
      column_times_ = kTransposed ? of_query : of_key;
      for_each_row([&](int half, int own) {
        row_times_[half] = __ldcg((kTransposed ? of_key : of_query) + own);
      });
      if (threadIdx.x == 0) {
        table.source = {kTransposed ? kv_time : q_time,
                        kTransposed ? q_time : kv_time,
                        kTransposed ? of_keys : of_queries,
                        kTransposed ? of_queries : of_keys,
                        num_rows(),
                        num_columns()};
      }
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
    if constexpr (kPositions) {
      if (has_positions())
        positions_ = PositionTable(params_, head / (params_.heads / bias().position_heads)).values;
    }
    if constexpr (kTimes) {
      if (has_times()) groups_.reset();
    }
  }

  // The bytes of copy_table().
  __device__ __forceinline__ static int table_bytes(const ScoreBias& bias) {
    return kTimes && bias.time_table != nullptr ? static_cast<int>(sizeof(TimeTable)) : 0;
  }
  // Copies what set_head() names, for whose bytes `full` waits; one thread.
  __device__ __forceinline__ void copy_table(int head, uint64_t& full) const {
    if constexpr (kTimes) {
      if (!has_times()) return;
      const int column = head / (params_.heads / bias().time_heads);
      ptx::cp_async_bulk(&table_.times, TimeTiles(params_).tables + column, sizeof(TimeTable),
                         full);
    }
  }

  // What load() is for from now on.
  __device__ __forceinline__ void set_load_head(int head) {
    if constexpr (!kTransposed && kKeys) {
      if (has_keys()) load_keys_ = key_column(head);
    }
  }

  // Asks for the step from `column` on, of which some columns are there; the caller commits and waits.
  __device__ __forceinline__ void load(Step& step, int column) {
    const int own = static_cast<int>(threadIdx.x), last = num_columns() - 1;
    if constexpr (!kTransposed && kKeys) {
      if (own < kColumns && has_keys())
        key_ = __ldg(load_keys_ + int64_t{min(column + own, last)} * bias().kv_heads);
    }
    static_assert(kThreads == 2 * kColumns && kThreads == kRows + kColumns);
    if constexpr (kTimes) {
      if (has_times()) {
        if (own < kColumns)
          ptx::cp_async_4(&step.times[own], column_times_ + min(column + own, last), 4);
      }
    }
  }

  // Behind the wait for a step, and before the barrier: each thread writes what it has loaded.
  __device__ __forceinline__ void finish_load(Step& step) const {
    const int own = static_cast<int>(threadIdx.x);
    if constexpr (!kTransposed && kKeys) {
      if (own < kColumns && has_keys()) step.keys[own] = key_ * unit_;
    }
  }

  // While scores are computed: finds what is wanted of the step from `column` on.
  __device__ __forceinline__ void prepare(int column) {
    if constexpr (kTimes) {
      if (has_times()) find_groups(column);
    }
  }

  // Scores become logits: `scale` has the unit in it. `column` is the first of the step; `hidden` names
  // groups of 16 columns of which the warp's rows see nothing, whose values do not matter. kCompact is
  // for kernels whose code is long: fewer instructions in memory, more that are executed.
  template <bool kCompact>
  __device__ __forceinline__ void scale_and_add(Scores& s, float scale, const Step& step,
                                                const Keys& keys, int column, unsigned hidden,
                                                int lane) {
    if constexpr (kKind == BiasKind::kKeys) {
      add_keys(s, scale, step, keys, lane);
    } else if constexpr (kKind == BiasKind::kPositions) {
      add_positions(s, scale, column);
    } else if constexpr (kKind == BiasKind::kTimes) {
      add_times<kCompact>(s, scale, step, column, hidden, lane);
    } else if constexpr (kKind == BiasKind::kAny) {
      if (has_positions()) {
        add_positions(s, scale, column);
        scale = 1.0f;
      }
      if (has_keys()) {
        add_keys(s, scale, step, keys, lane);
        scale = 1.0f;
      }
      if (has_times()) add_times<kCompact>(s, scale, step, column, hidden, lane);
    }
  }

  // --- for the gradients of tables (table_gradients.cuh)

  __device__ __forceinline__ const ScoreBias& bias() const { return params_.bias; }
  // The bucket of diagonal 0 of the step from `column` on, if there were as many; those of the others
  // fall by one each, or grow if kTransposed.
  __device__ __forceinline__ int first_position(int column) const {
    return kTransposed ? first_diagonal_ + column : first_diagonal_ - column;
  }
  __device__ __forceinline__ const TimeGroups& groups() const { return groups_; }
  __device__ __forceinline__ const TimeGroup& group(int place) const {
    return table_.groups[threadIdx.x / 32][place];
  }
  __device__ __forceinline__ const TimeTable& table() const { return table_.times; }

  // use(group as a constant), so that registers can be named by it.
  template <typename Use>
  __device__ __forceinline__ static void with_group(int group, Use use) {
    if (group == 0) {
      use(std::integral_constant<int, 0>{});
    } else if (group == 1) {
      use(std::integral_constant<int, 1>{});
    } else if (group == 2) {
      use(std::integral_constant<int, 2>{});
    } else {
      use(std::integral_constant<int, 3>{});
    }
  }

  // Calls use(i, whether it is behind the boundary) for the lane's 8 scores of a group of two buckets.
  template <typename Use>
  __device__ __forceinline__ void for_each_side(int group, const TimeGroup& own, const Step& step,
                                                int lane, Use use) const {
    const int least[2] = {static_cast<int>(own.boundary - row_times_[0]),
                          static_cast<int>(own.boundary - row_times_[1])};
    for_each_column(group, step, lane, [&](int i, uint32_t column) {
      use(i, static_cast<int>(column) >= least[i / 2 % 2]);
    });
  }

  // Calls use(i, distance and one) for the lane's 8 scores of a narrow group.
  template <typename Use>
  __device__ __forceinline__ void for_each_distance(int group, bool ordered, const TimeGroup& own,
                                                    const Step& step, int lane, Use use) const {
    const uint32_t rows[2] = {own.apart + 1 + row_times_[0], own.apart + 1 + row_times_[1]};
    uint32_t away[8];
    for_each_column(group, step, lane,
                    [&](int i, uint32_t column) { away[i] = rows[i / 2 % 2] + column; });
    if (!ordered) {
      const int mirrored = bias().symmetric ? -1 : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int difference = static_cast<int>(away[i] - 1);
        away[i] = static_cast<uint32_t>(max(difference, difference * mirrored)) + 1;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) use(i, away[i]);
  }

  // The bucket and the value of one of the 8 scores of a group, whatever its times.
  __device__ __forceinline__ TimeTable::Look look(int group, int i, int column, int lane) const {
    const TimeSource& source = table_.source;
    const int row = min(row_ + warp_row_ + 8 * (i / 2 % 2) + lane / 4, source.num_rows - 1),
              other = min(column + group * 16 + i / 4 * 8 + 2 * (lane % 4) + i % 2,
                          source.num_columns - 1);
    const int64_t row_time = __ldg(source.rows + row), time = __ldg(source.columns + other);
    const int64_t query = kTransposed ? time : row_time, key = kTransposed ? row_time : time;
    return table_.times.look(
        bias(), !bias().symmetric && query < key ? 0 : time_between(query, key), unit_);
  }

 private:
  template <typename Use>
  __device__ __forceinline__ static void for_each_column(int group, const Step& step, int lane,
                                                         Use use) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const auto pair =
          *reinterpret_cast<const uint2*>(&step.times[group * 16 + b * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) use(b * 4 + i, i % 2 == 0 ? pair.x : pair.y);
    }
  }
  __device__ __forceinline__ void find_groups(int column) {
    groups_.template find<kTransposed>(table_.groups[threadIdx.x / 32], bias(), table_.times,
                                       table_.source, unit_, row_ + warp_row_, column);
  }
  __device__ __forceinline__ bool has_keys() const {
    return kKind == BiasKind::kKeys || bias().kv_bias != nullptr;
  }
  __device__ __forceinline__ bool has_positions() const {
    return kKind == BiasKind::kPositions || bias().position_table != nullptr;
  }
  __device__ __forceinline__ bool has_times() const {
    return kKind == BiasKind::kTimes || bias().time_table != nullptr;
  }
  __device__ __forceinline__ int num_rows() const {
    return static_cast<int>(kTransposed ? kv_.len : queries_.len);
  }
  __device__ __forceinline__ int num_columns() const {
    return static_cast<int>(kTransposed ? queries_.len : kv_.len);
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

  __device__ __forceinline__ void add_positions(Scores& s, float scale, int column) const {
    // A step beyond an end of the table has one value, as it lies in the margin.
    const int last = bias().position_buckets - 1, first = first_position(column),
              place = own_position_ + (kTransposed ? max(min(first, last), 1 - kDiagonals)
                                                   : max(min(first, last + kDiagonals - 1), 0));
    const float* pairs = PositionTable::pair(positions_, bias().position_buckets, place);
    // Rows and columns 8 further on have the same diagonals.
#pragma unroll
    for (int step8 = -1; step8 < kBlocks; ++step8) {
      const float2 pair =
          *reinterpret_cast<const float2*>(pairs + (kTransposed ? 8 * step8 : -8 * step8));
      const float added[2] = {kTransposed ? pair.x : pair.y, kTransposed ? pair.y : pair.x};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int block = step8 + half;
        if (block < 0 || block >= kBlocks) continue;
        float* two = &s[0][block][half * 2];
        two[0] = __fmaf_rn(two[0], scale, added[0]);
        two[1] = __fmaf_rn(two[1], scale, added[1]);
      }
    }
  }

  template <bool kCompact>
  __device__ __forceinline__ void add_times(Scores& s, float scale, const Step& step, int column,
                                            unsigned hidden, int lane) {
    constexpr unsigned kOfStep = 0xf;
    const int source = TimeGroups::place_of(column);
    const unsigned one = (groups_.one >> source & kOfStep) | hidden,
                   two = groups_.two >> source & kOfStep,
                   narrow = groups_.narrow >> source & kOfStep;
    if (one == kOfStep) {  // in a row, so that their latencies overlap
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const float added = this->group(source + group).value;
        float (*own)[4] = &s[0][group * 2];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = __fmaf_rn(own[i / 4][i % 4], scale, added);
      }
      return;
    }
    if (!kCompact && (one | two | narrow) != kOfStep) {  // in local memory: this is seldom used
      float found[kBlocks * 4];
#pragma unroll 1
      for (int i = 0; i < kBlocks * 4; ++i) found[i] = look(i / 8, i % 8, column, lane).value;
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i)
        s[0][i / 4][i % 4] = __fmaf_rn(s[0][i / 4][i % 4], scale, found[i]);
      return;
    }
    const unsigned ordered = groups_.ordered >> source;
    // Calls use(i, what is added) for the lane's 8 scores of a group.
    const auto find = [&](int group, auto use) {
      const TimeGroup own = this->group(source + group);
      if (one >> group & 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) use(i, own.value);
      } else if (two >> group & 1) {
        for_each_side(group, own, step, lane,
                      [&](int i, bool behind) { use(i, behind ? own.behind : own.value); });
      } else if (!kCompact || (narrow >> group & 1) != 0) {
        for_each_distance(group, ordered >> group & 1, own, step, lane, [&](int i, uint32_t away) {
          const TimeCell cell = table_.times.cell(away);
          use(i, away >= cell.boundary ? cell.behind : cell.value);
        });
      } else {
#pragma unroll 1
        for (int element = 0; element < 8; ++element) {
          const float found = look(group, element, column, lane).value;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (i == element) use(i, found);
          }
        }
      }
    };
    if constexpr (kCompact) {
#pragma unroll 1
      for (int group = 0; group < 4; ++group) {
        float added[8];
        find(group, [&](int i, float value) { added[i] = value; });
        with_group(group, [&](auto constant) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& score = s[0][constant.value * 2 + i / 4][i % 4];
            score = __fmaf_rn(score, scale, added[i]);
          }
        });
      }
    } else {
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        find(group, [&](int i, float value) {
          float& score = s[0][group * 2 + i / 4][i % 4];
          score = __fmaf_rn(score, scale, value);
        });
      }
    }
  }

  const AttentionBackwardParams& params_;
  RowRange queries_;
  RowRange kv_;
  int row_;
  int warp_row_;
  float unit_;
  const float* load_keys_;  // kv_bias of the head that is loaded; not kTransposed
  float key_;               // of the step that is loaded
  int first_diagonal_;
  int own_position_;  // where the lane's first pair of diagonals lies if that of diagonal 0 is 0
  const float* positions_;  // PositionTable::values of the head
  const uint32_t* column_times_;
  uint32_t row_times_[2];  // of the lane's rows, likewise
  LogitTable<kKind>& table_;
  TimeGroups groups_;
};

}  // namespace jagged_cuda::attention
