// Which keys a query has in its ranges (AttentionParams::key_ranges): a part of the mask that is
// read from memory. Whatever the ranges hold, no key outside the sequence is touched: they only
// take away from what the window lets a query see.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

#include <climits>

namespace jagged_cuda::attention {

// The ranges of one query, the second of which is empty where there is only one.
struct RowRanges {
  KeyInterval first;
  KeyInterval second;

  RowRanges() = default;
  // `global_row` is a row of q, and params.key_ranges not null.
  __device__ __forceinline__ RowRanges(const AttentionParams& params, int64_t global_row) {
    const auto* g =
        reinterpret_cast<const int2*>(params.key_ranges) + global_row * params.num_key_ranges;
    const int2 one = __ldg(g), other = params.num_key_ranges > 1 ? __ldg(g + 1) : make_int2(0, 0);
    first = {one.x, one.y};
    second = {other.x, other.y};
  }

  // Without branches, of which masks would have one for each score.
  template <typename Key>
  __device__ __forceinline__ bool contains(Key key) const {
    return ((key >= first.begin) & (key < first.end)) |
           ((key >= second.begin) & (key < second.end));
  }
  template <typename Key>
  __device__ __forceinline__ bool contains_all(Key key, int keys) const {
    return (key >= first.begin && key + keys <= first.end) ||
           (key >= second.begin && key + keys <= second.end);
  }
  // Whether it holds some of keys [key, key + keys).
  __device__ __forceinline__ bool meets(int64_t key, int keys) const {
    return meets(first, key, keys) || meets(second, key, keys);
  }

 private:
  __device__ __forceinline__ static bool meets(const KeyInterval& range, int64_t key, int keys) {
    return range.begin < range.end && range.begin < key + keys && range.end > key;
  }
};

// The steps of kStep keys that a tile of queries walks over: those in [first, gap) and [behind,
// last), where gap and behind are multiples of kStep. Without ranges there is no gap.
template <int kStep, bool kGeneral>
struct KeySteps {
  int64_t last;
  int64_t first;
  int64_t gap;
  int64_t behind;

  // The first `rows` queries of a tile. With ranges, steps of which none of them sees a key are left
  // out, but for those between the first key in their first ranges and the last, and likewise for
  // the second. All 32 lanes of a warp together.
  __device__ __forceinline__ KeySteps(const AttentionParams& params, const Window& window,
                                      const JaggedTile& tile, int rows, int64_t num_keys)
      : last(window.last_column(tile.row, rows, num_keys)),
        first(window.first_column(tile.row)),
        gap(last),
        behind(last) {
    if (kGeneral && params.key_ranges != nullptr) {
      leave_out(params, tile.rows.begin + tile.row, rows);
    } else {
      first = first / kStep * kStep;
    }
  }

  __device__ __forceinline__ int64_t next(int64_t key) const {
    key += kStep;
    return kGeneral && key >= gap && key < behind ? behind : key;
  }

 private:
  struct Run {
    int64_t begin;
    int64_t end;
  };

  __device__ __forceinline__ void leave_out(const AttentionParams& params, int64_t global_row,
                                            int rows) {
    KeyInterval one{INT_MAX, INT_MIN}, other = one;
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
      const RowRanges ranges(params, global_row + row);
      widen(one, ranges.first);
      widen(other, ranges.second);
    }
    Run low = run_of(one), high = run_of(other);
    if (high.begin < low.begin) {
      const Run swapped = low;
      low = high;
      high = swapped;
    }
    if (low.begin >= low.end) {
      first = last;
      return;
    }
    const bool has_second = high.begin < high.end;
    first = low.begin / kStep * kStep;
    gap = (low.end + kStep - 1) / kStep * kStep;
    behind = high.begin / kStep * kStep;
    last = has_second ? max(low.end, high.end) : low.end;
    if (!has_second || behind <= gap) gap = behind = last;  // they are one
  }

  __device__ __forceinline__ static void widen(KeyInterval& all, const KeyInterval& range) {
    if (range.begin >= range.end) return;
    all.begin = min(all.begin, range.begin);
    all.end = max(all.end, range.end);
  }

  // Of all lanes, within [first, last); an empty one is at `last`.
  __device__ __forceinline__ Run run_of(const KeyInterval& all) const {
    const int64_t begin = __reduce_min_sync(0xffffffffu, all.begin),
                  end = __reduce_max_sync(0xffffffffu, all.end);
    const Run run{max(begin, first), min(end, last)};
    return run.begin < run.end ? run : Run{last, last};
  }
};

// Whether some of the queries [query, query + kQueries) has keys [key, key + keys) in its ranges. All
// 32 lanes of a warp together.
template <int kQueries>
__device__ __forceinline__ bool some_query_sees(const AttentionParams& params,
                                                const RowRange& queries, int64_t query, int64_t key,
                                                int keys) {
  if (params.key_ranges == nullptr) return true;
  const int64_t last = min(query + kQueries, queries.len);
  bool met = false;
  for (int64_t row = query + threadIdx.x % 32; row < last; row += 32)
    met = met || RowRanges(params, queries.begin + row).meets(key, keys);
  return __any_sync(0xffffffffu, met);
}

// A step of queries, and whether keys are hidden from some of them by their ranges.
struct QueryStep {
  int64_t query;
  bool cut;
};

// The first step from `query` on, out of those before `last`, of which some query has keys
// [key, key + keys) in its ranges; `last` or more if there is none. All 32 lanes of a warp together.
template <int kStep>
__device__ __forceinline__ QueryStep find_step_that_sees(const AttentionParams& params,
                                                         const RowRange& queries, int64_t query,
                                                         int64_t last, int64_t key, int keys) {
  static_assert(kStep <= 32);
  constexpr unsigned kAll = 0xffffffffu;
  struct Seen {
    bool any, all;
  };
  const auto sees = [&](int64_t step) {
    const int64_t row = step + threadIdx.x % kStep;
    if (step >= last) return Seen{false, false};
    if (row >= queries.len) return Seen{false, true};
    const RowRanges ranges(params, queries.begin + row);
    return Seen{ranges.meets(key, keys), ranges.contains_all(key, keys)};
  };
  const auto found = [&](int64_t step, const Seen& seen) {
    return QueryStep{step, !__all_sync(kAll, seen.all)};
  };
  if (query >= last) return {query, false};
  const Seen here = sees(query);
  if (__any_sync(kAll, here.any)) return found(query, here);
  constexpr int kAhead = 4;  // steps whose ranges are read at once
  for (query += kStep; query < last; query += kAhead * kStep) {
    Seen seen[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) seen[i] = sees(query + i * kStep);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (__any_sync(kAll, seen[i].any)) return found(query + i * kStep, seen[i]);
    }
  }
  return {last, false};
}

// The ranges of a lane's rows: queries, of which its first is `row` of the `rows` from global_row on.
template <int kRowBlocks>
struct LaneRanges {
  RowRanges rows[kRowBlocks][2];

  __device__ __forceinline__ LaneRanges(const AttentionParams& params, int64_t global_row, int row,
                                        int rows_there) {
    if (params.key_ranges == nullptr) return;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[r][half] =
            RowRanges(params, global_row + min(row + 16 * r + 8 * half, rows_there - 1));
    }
  }
};

// Scores of keys that are in no range of their query become `value`; columns are keys from `key` on.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void replace_outside_ranges(Accumulator<kRowBlocks, kBlocks>& s,
                                                       float value,
                                                       const LaneRanges<kRowBlocks>& lane_ranges,
                                                       int key, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowRanges& ranges = lane_ranges.rows[r][half];
      if (ranges.contains_all(key, kBlocks * 8)) continue;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s[r][block][2 * half + i];
          score = ranges.contains(key + block * 8 + 2 * (lane % 4) + i) ? score : value;
        }
      }
    }
  }
}

// The same where rows are keys, of which `key` is this lane's first, and columns the `queries`
// queries from global_row on.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void replace_outside_ranges_transposed(
    Accumulator<kRowBlocks, kBlocks>& s, float value, const AttentionParams& params,
    int64_t global_row, int queries, int64_t key, int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(block * 8 + 2 * (lane % 4) + i, queries - 1);
      const RowRanges ranges(params, global_row + query);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = s[r][block][2 * half + i];
          score = ranges.contains(static_cast<int>(key) + 16 * r + 8 * half) ? score : value;
        }
      }
    }
  }
}

}  // namespace jagged_cuda::attention
