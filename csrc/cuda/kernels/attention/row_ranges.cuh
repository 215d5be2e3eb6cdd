// Which keys each query sees, out of window, lengths and ranges together, for kernels on wgmma: found
// once for a tile of queries, in 32 bits, by a warp of producers, and kept in shared memory. Whatever
// the ranges hold, no key outside the sequence is among them.
//
// Out of the rows' intervals come the steps of keys that a tile walks over, and for each warp of 16
// rows what is wanted to tell a step that all of them see from one with an edge: only at edges are
// the rows' intervals looked at.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/tiles.cuh"

#include <climits>

namespace jagged_cuda::attention {

// Keys [begin, end) of up to two runs, of which the second begins behind the first. An empty one
// is {0, 0}.
struct alignas(16) RowKeys {
  KeyInterval first;
  KeyInterval second;

  RowKeys() = default;
  // What the row of the tile's sequence sees that is row `global_row` of q.
  __device__ __forceinline__ RowKeys(const AttentionParams& params, const WindowOf<int>& window,
                                     int row, int64_t global_row, int num_keys) {
    const int low = max(0, row + window.diagonal - window.before),
              high = min(num_keys, row + window.diagonal + window.after + 1);
    if (params.key_ranges == nullptr) {
      first = cut({low, high}, low, high);
      return;
    }
    const auto* g =
        reinterpret_cast<const int2*>(params.key_ranges) + global_row * params.num_key_ranges;
    const int2 one = __ldg(g), other = params.num_key_ranges > 1 ? __ldg(g + 1) : make_int2(0, 0);
    first = cut({one.x, one.y}, low, high);
    second = cut({other.x, other.y}, low, high);
    if (second.end != 0 && (first.end == 0 || second.begin < first.begin)) {
      const KeyInterval swapped = first;
      first = second;
      second = swapped;
    }
    if (second.end != 0 && second.begin <= first.end) {  // they are one
      first.end = max(first.end, second.end);
      second = {0, 0};
    }
  }

  __device__ __forceinline__ bool contains(int key) const {
    return (key >= first.begin && key < first.end) || (key >= second.begin && key < second.end);
  }

 private:
  __device__ __forceinline__ static KeyInterval cut(const KeyInterval& range, int low, int high) {
    const int begin = max(range.begin, low), end = min(range.end, high);
    return begin < end ? KeyInterval{begin, end} : KeyInterval{0, 0};
  }
};

// The hull of intervals; empty ones are left out.
struct KeyHull {
  int begin = INT_MAX;
  int end = 0;

  __device__ __forceinline__ void widen(const KeyInterval& range) {
    if (range.end == 0) return;
    begin = min(begin, range.begin);
    end = max(end, range.end);
  }
  __device__ __forceinline__ KeyHull of_warp() const {
    return {__reduce_min_sync(0xffffffffu, begin), __reduce_max_sync(0xffffffffu, end)};
  }
};

// Bounds of 16 rows. Without rows: all is seen.
struct alignas(16) WarpKeys {
  KeyInterval first{0, INT_MAX};  // in the first intervals of all rows
  KeyInterval second{0, INT_MAX};

  __device__ __forceinline__ void add(const RowKeys& row) {
    first = {max(first.begin, row.first.begin), min(first.end, row.first.end)};
    second = {max(second.begin, row.second.begin), min(second.end, row.second.end)};
  }
  // Whether all rows see all of a step of keys.
  __device__ __forceinline__ bool see(int key, int keys) const {
    return (key >= first.begin && key + keys <= first.end) ||
           (key >= second.begin && key + keys <= second.end);
  }
};

// The steps of keys, multiples of `step`, in [first, gap) and [behind, last).
struct KeySteps32 {
  int first;
  int gap;
  int behind;
  int last;

  KeySteps32() = default;
  // Of rows whose first intervals lie in `one` and whose second ones lie in `other`.
  __device__ __forceinline__ KeySteps32(const KeyHull& one, const KeyHull& other, int step) {
    KeyHull low = one, high = other;
    if (high.begin < low.begin) {
      low = other;
      high = one;
    }
    last = max(low.end, high.end);
    first = last > 0 ? low.begin / step * step : 0;
    gap = (low.end + step - 1) / step * step;
    behind = high.end > 0 ? high.begin / step * step : gap;
    if (behind <= gap) gap = behind = last;  // they are one
  }

  __device__ __forceinline__ int next(int key, int step) const {
    key += step;
    return key >= gap && key < behind ? behind : key;
  }
  __device__ __forceinline__ int keys() const { return gap - first + last - behind; }
};

// Of a tile of kRows queries.
template <int kRows_>
struct TileKeys {
  static constexpr int kRows = kRows_, kWarps = kRows / 16;
  RowKeys rows[kRows];
  WarpKeys warps[kWarps];
  KeySteps32 steps;
  int last[kRows /
           64];  // behind the last key that each warpgroup's rows see, at least steps.first + 1

  // One warp. Rolled loops: it has the time of several items, and the less it fetches of code the more
  // stays for the warps that compute.
  __device__ __forceinline__ void find(const AttentionParams& params, const QueryTile& tile,
                                       int step) {
    const int lane = threadIdx.x % 32;
    const WindowOf<int> window = window_of(params, tile);
    KeyHull one, other;
#pragma unroll 1
    for (int row = lane; row < tile.rows; row += 32) {
      const RowKeys seen(params, window, tile.row + row, tile.global_row + row, tile.num_keys);
      one.widen(seen.first);
      other.widen(seen.second);
      rows[row] = seen;
    }
    const KeySteps32 found(one.of_warp(), other.of_warp(), step);
    __syncwarp();
    int own_last = found.first + 1;
    if (lane < kWarps) {
      WarpKeys bounds;
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        const int row = lane * 16 + (i + lane) % 16;  // so that lanes read different banks
        if (row >= tile.rows) continue;
        bounds.add(rows[row]);
        own_last = max(own_last, max(rows[row].first.end, rows[row].second.end));
      }
      warps[lane] = bounds;
    }
    for (int other_lane = 1; other_lane < 4; other_lane *= 2)
      own_last = max(own_last, __shfl_xor_sync(0xffffffffu, own_last, other_lane));
    if (lane % 4 == 0 && lane < kWarps) last[lane / 4] = own_last;
    if (lane == 0) steps = found;
  }
};

// Of the columns that a lane has of a step, two of each block of 8, those before `end`, which is counted
// from its first one: a bit for each.
__device__ __forceinline__ uint32_t columns_before(int end) {
  const int columns = 2 * (end >> 3) + min(end & 7, 2);
  return columns >= 32 ? ~0u : (1u << max(columns, 0)) - 1;
}

// Scores of keys that their row does not see become `value`. This lane has rows[0] and rows[8];
// columns are keys from `key` on. By bits, in few instructions whatever is hidden: a long item comes
// here seldom, a short one finds them in no cache.
template <int kBlocks>
__device__ __forceinline__ void replace_unseen(Accumulator<1, kBlocks>& s, float value,
                                               const RowKeys* rows, int key, int lane) {
  static_assert(kBlocks <= 16);
  const int first_key = key + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowKeys row = rows[8 * half];
    const auto within = [&](const KeyInterval& keys) {
      return columns_before(keys.end - first_key) & ~columns_before(keys.begin - first_key);
    };
    const uint32_t seen = within(row.first) | within(row.second);
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      float& score = s[0][i / 2][2 * half + i % 2];
      score = (seen & (1u << i)) != 0 ? score : value;
    }
  }
}

}  // namespace jagged_cuda::attention
