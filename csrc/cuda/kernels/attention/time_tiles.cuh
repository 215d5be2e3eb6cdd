// What kernels on wgmma know of the times of tiles (logit_bias.cuh). A kernel before them finds for
// each 16 rows the soonest and the latest time, and for each table the values by cells of distances,
// so that one look gives the value of any distance below 2^31. They lie behind the bounds of tiles in
// memory: [time_heads] of TimeTable, then a TimeSpan for each 16 rows of q and for each 16 of k, and
// how far each query is behind the soonest of its 16, and each key before the latest of its 16: with
// the distance of these two, their sum is how far the one is behind the other, modulo 2^32.
//
// Out of the spans each warp finds what 16 rows and 16 columns need (TimeGroups).
#pragma once

#include "cuda/kernels/attention/time_buckets.cuh"
#include "cuda/kernels/attention/time_tiles.h"
#include "cuda/kernels/prim/jagged.cuh"

namespace jagged_cuda::attention {

// Of distances at its begin, `value` and `bucket`; of those from `boundary` - 1 on, `behind` and one
// bucket more.
struct alignas(16) TimeCell {
  uint32_t boundary;
  float value;
  float behind;
  uint32_t bucket;
};

// The cells of one table, in the unit of logits, by distance + 1, so that it is above 0. `crowded` cells
// have more than one boundary.
struct TimeTable {
  static constexpr int kCells = kTimeCells;
  static constexpr int kFirst = 8;  // of TimeCells: that of 1
  TimeCell cells[kCells];
  alignas(16) const float* values;  // [time_buckets]
  uint32_t crowded;                 // whether any cell is

  // Of a distance below 2^31.
  __device__ __forceinline__ const TimeCell& cell(uint32_t away_and_one) const {
    const uint32_t bits = __float_as_uint(__uint2float_rz(away_and_one));
    const uint32_t offset = (bits >> 16 & 0xfff0u) - (0x3f800000u >> 16);
    return *reinterpret_cast<const TimeCell*>(reinterpret_cast<const char*>(cells) + offset);
  }
  // Of any distance.
  struct Look {
    int bucket;
    float value;
  };
  __device__ __forceinline__ Look look(const ScoreBias& bias, uint64_t away, float unit) const {
    if (away >= TimeCells::kLimit || crowded != 0) {
      const int bucket = bucket_of(bias, away, 0, bias.time_buckets - 1);
      return {bucket, __ldg(values + bucket) * unit};
    }
    const uint32_t away_and_one = static_cast<uint32_t>(away) + 1;
    const TimeCell own = cell(away_and_one);
    const bool behind = away_and_one >= own.boundary;
    return {static_cast<int>(own.bucket) + (behind ? 1 : 0), behind ? own.behind : own.value};
  }

  // All threads of a CTA.
  template <int kThreads>
  __device__ __forceinline__ void fill(const ScoreBias& bias, const float* gTable, float unit) {
    const int last = bias.time_buckets - 1;
    int many = 0;
    for (int index = threadIdx.x; index < kCells; index += kThreads) {
      constexpr int kLast = TimeCells::kCells - kFirst;  // that of 2^31
      const int64_t begin = int64_t{TimeCells::begin_of(min(index, kLast) + kFirst)} - 1,
                    end = index < kLast ? int64_t{TimeCells::begin_of(index + 1 + kFirst)} - 1
                                        : int64_t{TimeCells::kLimit};
      const int bucket = bucket_of(bias, begin, 0, last), behind = min(bucket + 1, last);
      const auto boundary = [&](int i) {
        return i < last ? __ldg(bias.boundaries + i) : LLONG_MAX;
      };
      const int64_t next = boundary(bucket);
      many |= boundary(bucket + 1) < end;
      cells[index] = {next < end ? static_cast<uint32_t>(next) + 1 : ~0u,
                      __ldg(gTable + bucket) * unit, __ldg(gTable + behind) * unit,
                      static_cast<uint32_t>(bucket)};
    }
    many = __syncthreads_or(many);
    if (threadIdx.x == 0) {
      values = gTable;
      crowded = many;
    }
  }
};

static_assert(sizeof(TimeTable) == kTimeTableBytes && sizeof(TimeSpan) == kTimeSpanBytes);

// What follows the bounds of tiles.
__device__ __forceinline__ char* behind_bounds(const AttentionBackwardParams& params) {
  const OffsetsView& q = params.q_offsets;
  return static_cast<char*>(params.tile_bounds) +
         (q.total / 64 + q.num_seqs + 2) * kTileBoundsBytes;
}

// The values of position_bias of one head in the unit of logits: bucket i at i + kMargin, and both ends
// once more for all of the margins, so that the diagonals of any step are one run. Twice, the second
// time one further on, so that each pair of neighbours lies aligned in one of the two.
struct PositionTable {
  static constexpr int kMargin = kPositionMargin;
  static_assert(kMargin >= 128);
  float* values;  // [2][position_line(position_buckets)]

  __device__ __forceinline__ PositionTable(const AttentionBackwardParams& params, int column) {
    values = reinterpret_cast<float*>(behind_bounds(params)) +
             column * 2 * position_line(params.bias.position_buckets);
  }
  // Of the numbers at `place` and behind it, out of those that a margin or the table has.
  __device__ __forceinline__ static const float* pair(const float* values, int buckets, int place) {
    return values + (place + place % 2 * (position_line(buckets) + 1));
  }

  // Some threads of several CTAs.
  __device__ __forceinline__ void fill(const ScoreBias& bias, int column, float unit, int thread,
                                       int threads) const {
    const int buckets = bias.position_buckets;
    const float* g = static_cast<const float*>(bias.position_table) + column * buckets;
    for (int i = thread; i < buckets + 2 * kMargin; i += threads) {
      const float value = __ldg(g + max(min(i - kMargin, buckets - 1), 0)) * unit;
      values[i] = value;
      values[position_line(buckets) + 1 + i] = value;
    }
  }
};

// Where what is known of times is.
struct TimeTiles {
  TimeTable* tables;  // [time_heads]
  TimeSpan* queries;  // by block_of_rows()
  TimeSpan* keys;
  uint32_t* behind_soonest;  // [Tq]
  uint32_t* before_latest;   // [Tk]

  static constexpr int kRows = kTimeSpanRows;
  // That of row `row` of sequence `seq`, whose rows begin at `begin`.
  __device__ __forceinline__ static int64_t block_of_rows(int64_t begin, int64_t seq, int row) {
    return begin / kRows + seq + 1 + row / kRows;
  }
  __device__ __forceinline__ explicit TimeTiles(const AttentionBackwardParams& params) {
    const OffsetsView& q = params.q_offsets;
    tables =
        reinterpret_cast<TimeTable*>(behind_bounds(params) + position_tiles_bytes(params.bias));
    queries = reinterpret_cast<TimeSpan*>(tables + params.bias.time_heads);
    keys = queries + q.total / kRows + q.num_seqs + 2;
    const OffsetsView& kv = params.kv_offsets;
    behind_soonest = reinterpret_cast<uint32_t*>(keys + kv.total / kRows + kv.num_seqs + 2);
    before_latest = behind_soonest + q.total;
  }

  // Of the 64 rows of a tile; a warp.
  __device__ __forceinline__ void find_spans(bool of_keys, const JaggedTile& tile,
                                             const int64_t* gTimes) const {
    const int lane = threadIdx.x % 32, row = static_cast<int>(tile.row),
              len = static_cast<int>(tile.rows.len);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + half * 32 + lane;
      TimeSpan span;
      const int64_t time = own < len ? __ldg(gTimes + tile.rows.begin + own) : 0;
      if (own < len) span.include(time);
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) {
        span.soonest = min(span.soonest, __shfl_xor_sync(0xffffffffu, span.soonest, distance));
        span.latest = max(span.latest, __shfl_xor_sync(0xffffffffu, span.latest, distance));
      }
      if (own >= len) continue;
      if (lane % kRows == 0)
        (of_keys ? keys : queries)[block_of_rows(tile.rows.begin, tile.seq, own)] = span;
      const uint64_t offset =
          of_keys ? static_cast<uint64_t>(span.latest) - static_cast<uint64_t>(time)
                  : static_cast<uint64_t>(time) - static_cast<uint64_t>(span.soonest);
      (of_keys ? before_latest : behind_soonest)[tile.rows.begin + own] =
          static_cast<uint32_t>(offset);
    }
  }
};

// Where the times of a tile's sequence are: in shared memory, since they are seldom looked at.
struct TimeSource {
  const int64_t* rows;        // [num_rows]
  const int64_t* columns;     // [num_columns]
  const TimeSpan* row_spans;  // of each 16 rows
  const TimeSpan* column_spans;
  int num_rows;
  int num_columns;
};

// The times between 16 rows and 16 columns: the value of the nearest in the unit of logits, that of
// the bucket behind it, and the boundary between them, counted from the nearest distance on, modulo
// 2^32. `apart` is how far the soonest query is behind the latest key.
struct alignas(16) TimeGroup {
  float value;
  float behind;
  uint32_t boundary;
  uint32_t apart;
};

// Which buckets the times between a warp's rows and 32 groups of 16 columns have.
class TimeGroups {
 public:
  static constexpr int kColumns = TimeTiles::kRows, kWindow = 32 * kColumns;
  static constexpr uint64_t kNarrow = uint64_t{1} << 31;

  // The buckets of the nearest and the farthest times of this lane's group.
  int first;
  int last;
  // Groups with one bucket; those with two whose queries are all later than their keys, where
  // distances from the nearest on are below 2^31; those for which TimeTable::cell() serves; and those
  // of which no key is later than a query.
  unsigned one;
  unsigned two;
  unsigned narrow;
  unsigned ordered;

  // Which lane has the group of a column.
  __device__ __forceinline__ static int place_of(int column) { return column % kWindow / kColumns; }

  // Forgets what it knows: of another head.
  __device__ __forceinline__ void reset() { window_ = -1; }

  // Finds the groups of the step from `column` on for the warp whose rows begin at `row`. All 32 lanes
  // of a warp together.
  template <bool kTransposed>
  __device__ __forceinline__ void find(TimeGroup (&groups)[32], const ScoreBias& bias,
                                       const TimeTable& table, const TimeSource& source, float unit,
                                       int row, int column) {
    constexpr unsigned kAll = 0xffffffffu;
    if (column / kWindow != window_) {
      window_ = column / kWindow;
      const int lane = static_cast<int>(threadIdx.x) % 32, block = window_ * 32 + lane;
      const TimeSpan rows = source.row_spans[min(row, source.num_rows - 1) / kColumns].load(),
                     columns = source.column_spans[min(block, (source.num_columns - 1) / kColumns)]
                                   .load();
      const TimeDistances away = kTransposed ? TimeDistances(bias.symmetric, columns, rows)
                                             : TimeDistances(bias.symmetric, rows, columns);
      const TimeTable::Look nearest = table.look(bias, away.nearest, unit),
                            farthest = table.look(bias, away.farthest, unit);
      first = nearest.bucket;
      last = farthest.bucket;
      const TimeSpan &queries = kTransposed ? columns : rows, &keys = kTransposed ? rows : columns;
      TimeGroup group;
      group.value = nearest.value;
      group.behind = farthest.value;
      group.apart = static_cast<uint32_t>(queries.soonest) - static_cast<uint32_t>(keys.latest);
      group.boundary = ~0u;
      if (first < last)
        group.boundary = static_cast<uint32_t>(__ldg(bias.boundaries + first)) -
                         static_cast<uint32_t>(away.nearest);
      __syncwarp();
      groups[lane] = group;
      one = __ballot_sync(kAll, first == last);
      two = __ballot_sync(
          kAll, first + 1 == last && away.is_ordered && away.farthest - away.nearest < kNarrow);
      narrow = __ballot_sync(kAll, away.widest < kNarrow && table.crowded == 0);
      ordered = __ballot_sync(kAll, away.is_ordered);
      __syncwarp();
    }
  }

 private:
  int window_ = -1;
};

}  // namespace jagged_cuda::attention
