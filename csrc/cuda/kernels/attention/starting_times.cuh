// time_bias for kernels on wgmma whose rows are queries (starting_bias.cuh). Between 16 rows and 16
// keys there are mostly one or two buckets: a warp of producers finds which, and a computing warp then
// sets one value, or compares once for each score. Other scores are looked up one by one.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/row_ranges.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/time_buckets.cuh"

#include <climits>
#include <cmath>

namespace jagged_cuda::attention {

// A bias over the scale, which is not 0. What is finite stays so.
class BiasOverScale {
 public:
  BiasOverScale() = default;
  __device__ __forceinline__ explicit BiasOverScale(const AttentionParams& params)
      : factor_(1.0f / static_cast<float>(params.scale)) {}
  __device__ __forceinline__ float operator()(float bias) const {
    constexpr float kMost = 1e37f;
    const float quotient = bias * factor_;
    return isinf(quotient) && !isinf(bias) ? copysignf(kMost, quotient) : quotient;
  }

 private:
  float factor_;
};

// How the scores between 16 rows and 16 keys find their values.
enum class TimeKind : int {
  kOne,     // all have the value `early`
  kTwo,     // `early` where the key's time is at most the row's plus `shift`, else `late`
  kCells,   // distances are those of times in 32 bits, rows' less keys' plus `shift`
  kSearch,  // wider ones
};
struct alignas(16) TimeGroup {
  float early;
  float late;
  int shift;
  TimeKind kind;
};

// Times are kept in 32 bits, less the soonest of 16 rows or keys, whose span must be below this.
constexpr uint64_t kNarrowSpan = 1u << 30;
__device__ __forceinline__ bool is_narrow(const TimeSpan& span) {
  return time_between(span.soonest, span.latest) < kNarrowSpan;
}

// Of four lanes four times each, from `first` on, none behind `last`: their span, and the lane's own
// less the soonest.
__device__ __forceinline__ TimeSpan spans_of_16(const int64_t* g, int first, int last,
                                                int4& relative) {
  int64_t times[4];
  TimeSpan span;
#pragma unroll
  for (int i = 0; i < 4; ++i) times[i] = __ldg(g + min(first + i, last));
#pragma unroll
  for (int i = 0; i < 4; ++i) span.include(times[i]);
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    span.soonest = min(span.soonest, __shfl_xor_sync(0xffffffffu, span.soonest, distance));
    span.latest = max(span.latest, __shfl_xor_sync(0xffffffffu, span.latest, distance));
  }
  const auto less = [&](int64_t time) {
    return static_cast<int>(min(time_between(time, span.soonest), kNarrowSpan));
  };
  relative = make_int4(less(times[0]), less(times[1]), less(times[2]), less(times[3]));
  return span;
}

// Of tiles of kTileM rows, of which kItems are on their way, and steps of kTileN keys, of which kSteps.
template <int kTileM, int kTileN, int kItems, int kSteps>
struct StartingTimes {
  static constexpr int kRowGroups = kTileM / 16, kKeyGroups = kTileN / 16;
  static_assert(kTileN == 128);  // a lane has four keys

  TimeCells cells;
  BiasOverScale over_scale;
  alignas(16) TimeGroup groups[kSteps][kRowGroups][kKeyGroups];
  alignas(16) int keys[kSteps][kTileN];
  alignas(16) int rows[kItems][kTileM];
  int table[kItems];  // of the item's head: where it begins
  // Of one item, for the warp that writes.
  TimeSpan spans[kRowGroups];
  KeyInterval seen[kRowGroups];  // in it lie all keys that rows see

  // By all threads, before others.
  template <int kThreads>
  __device__ __forceinline__ void init(const AttentionParams& params) {
    if (threadIdx.x == 0) over_scale = BiasOverScale(params);
    cells.template fill<kThreads>(params.bias);
  }

  // One warp, before the steps of an item.
  __device__ __forceinline__ void begin_item(const AttentionParams& params, const QueryTile& tile,
                                             int head, const RowKeys* visible, int stage) {
    const int lane = threadIdx.x % 32;
    const ScoreBias& bias = params.bias;
    const int64_t* g = bias.q_time + tile.global_row;
    for (int first = 0; first < kTileM; first += 128) {
      const int row = first + 4 * lane;
      int4 relative;
      const TimeSpan span = spans_of_16(g, row, tile.rows - 1, relative);
      if (row >= kTileM) continue;
      *reinterpret_cast<int4*>(&rows[stage][row]) = relative;
      if (lane % 4 == 0) spans[row / 16] = span;
    }
    if (lane < kRowGroups) {
      KeyHull hull;
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int row = lane * 16 + (i + lane) % 16;  // so that lanes read different banks
        if (row >= tile.rows) continue;
        hull.widen(visible[row].first);
        hull.widen(visible[row].second);
      }
      seen[lane] = {hull.begin, hull.end};
    }
    if (lane == 0) table[stage] = head / (params.heads / bias.time_heads) * bias.time_buckets;
    __syncwarp();
  }

  // One warp: what the step of keys from `key` on brings.
  __device__ __forceinline__ void write(const AttentionParams& params, const QueryTile& tile,
                                        int stage, int step, int key) {
    const int lane = threadIdx.x % 32, group = lane % kKeyGroups;
    int4 relative;
    const TimeSpan own = spans_of_16(params.bias.kv_time + tile.key_begin, key + 4 * lane,
                                     tile.num_keys - 1, relative);
    *reinterpret_cast<int4*>(&keys[step][4 * lane]) = relative;
    TimeSpan span;
    span.soonest = __shfl_sync(0xffffffffu, own.soonest, 4 * group);
    span.latest = __shfl_sync(0xffffffffu, own.latest, 4 * group);
    const int first_key = key + 16 * group;
#pragma unroll 1
    for (int row_group = lane / kKeyGroups; row_group < kRowGroups; row_group += 32 / kKeyGroups) {
      TimeGroup found{0.0f, 0.0f, 0, TimeKind::kOne};
      if (seen[row_group].begin < first_key + 16 && seen[row_group].end > first_key)
        found = between(params, stage, spans[row_group], span);
      groups[step][row_group][group] = found;
    }
  }

  // Sets the scores of this lane, of which `row` in the tile is its first row. `key` is the step's
  // first, `first_row` the tile's first in q.
  template <int kBlocks>
  __device__ __forceinline__ void load(Accumulator<1, kBlocks>& s, const AttentionParams& params,
                                       const QueryTile& tile, int stage, int step, int row, int key,
                                       int lane) const {
    static_assert(kBlocks == 2 * kKeyGroups);
    const TimeGroup* own = groups[step][row / 16];
    const int own_rows[2] = {rows[stage][row], rows[stage][row + 8]};
    unsigned left = 0;  // groups that are still to be searched for
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      const TimeGroup found = own[group];
      float (&scores)[2][4] = *reinterpret_cast<float (*)[2][4]>(&s[0][2 * group]);
      if (found.kind == TimeKind::kOne) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] = found.early;
        continue;
      }
      const int shifted[2] = {own_rows[0] + found.shift, own_rows[1] + found.shift};
      int times[2][2];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int2 pair =
            *reinterpret_cast<const int2*>(&keys[step][group * 16 + block * 8 + 2 * (lane % 4)]);
        times[block][0] = pair.x;
        times[block][1] = pair.y;
      }
      if (found.kind == TimeKind::kTwo) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          scores[i / 4][i % 4] =
              times[i / 4][i % 2] <= shifted[i % 4 / 2] ? found.early : found.late;
        }
        continue;
      }
      bool is_left = true;
      if (found.kind == TimeKind::kCells) {
        is_left = !find_in_cells(scores, params, table[stage], times, shifted);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] = 0.0f;  // so that none is kept until here
      }
      left |= is_left ? 1u << group : 0;
    }
    if (left == 0) return;
    // Of each score alone, exactly, one after the other.
#pragma unroll 1
    for (int element = 0; element < kBlocks * 4; ++element) {
      const int block = element / 4;
      if ((left >> (block / 2) & 1) == 0) continue;
      const int own_row = min(row + element % 4 / 2 * 8, tile.rows - 1),
                own_key = min(key + block * 8 + 2 * (lane % 4) + element % 2, tile.num_keys - 1);
      const int bucket =
          params.bias.time_bucket(__ldg(params.bias.q_time + tile.global_row + own_row),
                                  __ldg(params.bias.kv_time + tile.key_begin + own_key));
      const float value = value_of(params, table[stage], bucket);
#pragma unroll
      for (int e = 0; e < kBlocks * 4; ++e) {
        if (e == element) s[0][e / 4][e % 4] = value;
      }
    }
  }

 private:
  __device__ __forceinline__ float value_of(const AttentionParams& params, int table,
                                            int bucket) const {
    return over_scale(__ldg(static_cast<const float*>(params.bias.time_table) + table + bucket));
  }
  __device__ __forceinline__ int bucket(const AttentionParams& params, uint64_t away) const {
    return away < TimeCells::kLimit ? cells.bucket(params.bias, static_cast<uint32_t>(away))
                                    : bucket_of(params.bias, away, 0, params.bias.time_buckets - 1);
  }

  __device__ __forceinline__ TimeGroup between(const AttentionParams& params, int stage,
                                               const TimeSpan& row, const TimeSpan& key) const {
    const ScoreBias& bias = params.bias;
    const bool mixed = key.latest > row.soonest, mirrored = key.soonest > row.latest;
    // The farthest keys before and behind a row, and the nearest.
    const uint64_t before = row.latest > key.soonest ? time_between(row.latest, key.soonest) : 0,
                   behind = mixed ? time_between(key.latest, row.soonest) : 0;
    uint64_t nearest = mixed ? 0 : time_between(row.soonest, key.latest);
    if (bias.symmetric && mirrored) nearest = time_between(key.soonest, row.latest);
    const int first = bucket(params, nearest),
              last = bucket(params, bias.symmetric ? max(before, behind) : before);
    TimeGroup found;
    found.early = found.late = value_of(params, table[stage], first);
    found.shift = 0;
    found.kind = TimeKind::kOne;
    if (first == last) return found;
    const int64_t apart = static_cast<int64_t>(static_cast<uint64_t>(row.soonest) -
                                               static_cast<uint64_t>(key.soonest));
    found.kind = TimeKind::kSearch;
    if (!is_narrow(row) || !is_narrow(key)) return found;
    if (last == first + 1 && (!bias.symmetric || !mixed || mirrored)) {
      const int64_t boundary = __ldg(bias.boundaries + first);
      const float farther = value_of(params, table[stage], last);
      const bool turned = bias.symmetric && mirrored;
      (turned ? found.late : found.early) = farther;
      found.shift = static_cast<int>(turned ? apart + boundary - 1 : apart - boundary);
      found.kind = TimeKind::kTwo;
    } else if (max(before, behind) < kNarrowSpan) {
      found.shift = static_cast<int>(apart);
      found.kind = TimeKind::kCells;
    }
    return found;
  }

  // False if some boundaries are too near each other.
  __device__ __forceinline__ bool find_in_cells(float (&scores)[2][4],
                                                const AttentionParams& params, int table,
                                                const int (&times)[2][2],
                                                const int (&shifted)[2]) const {
    const int mirrored = params.bias.symmetric ? -1 : 0;
    const float* values = static_cast<const float*>(params.bias.time_table) + table;
    const BiasOverScale factor = over_scale;
    uint32_t marks = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int difference = shifted[i % 4 / 2] - times[i / 4][i % 2];
      const auto away = static_cast<uint32_t>(max(difference, difference * mirrored));
      const TimeCells::Cell cell = cells.cells[TimeCells::index_of(away)];
      marks |= cell.bucket;
      const int bucket =
          static_cast<int>(cell.bucket & ~TimeCells::kMany) + (away >= cell.boundary ? 1 : 0);
      scores[i / 4][i % 4] = factor(__ldg(values + bucket));
    }
    return (marks & TimeCells::kMany) == 0;
  }
};

}  // namespace jagged_cuda::attention
