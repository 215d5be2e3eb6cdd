// Which keys a query sees by its window and its ranges together, as two intervals in registers, and
// what a tile of queries sees, so that steps which nobody sees are left out and only those that are
// cut pay for a mask.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/attention/ranges.cuh"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

#include <climits>

namespace jagged_cuda::attention {

// Bits [0, count) of a word.
__device__ __forceinline__ uint32_t bits_below(int count) {
  return __funnelshift_lc(~0u, 0u, max(count, 0));
}

// Keys [begin, end) of a sequence; none where end <= begin.
struct KeySpan {
  int begin;
  int end;

  __device__ __forceinline__ bool is_empty() const { return end <= begin; }
  __device__ __forceinline__ bool holds(int key, int keys) const {
    return begin <= key && key + keys <= end;
  }
  __device__ __forceinline__ bool meets(int key, int keys) const {
    return !is_empty() && begin < key + keys && end > key;
  }
  // Those of keys [key, key + 32), the first in bit 0.
  __device__ __forceinline__ uint32_t bits(int key) const {
    return bits_below(end - key) & ~bits_below(begin - key);
  }
};

// The keys that one query sees, all within the sequence whatever the ranges hold.
struct VisibleKeys {
  KeySpan first;
  KeySpan second;

  VisibleKeys() = default;
  // Row `row` of a sequence, `global_row` of q. `window` is that of the sequence.
  __device__ __forceinline__ VisibleKeys(const AttentionParams& params, const WindowOf<int>& window,
                                         int64_t global_row, int row, int num_keys) {
    const int low = window.first_column(row), high = window.last_column(row, 1, num_keys);
    if (params.key_ranges == nullptr) {
      first = {low, high};
      second = {0, 0};
    } else {
      const RowRanges ranges(params, global_row);
      first = {max(ranges.first.begin, low), min(ranges.first.end, high)};
      second = {max(ranges.second.begin, low), min(ranges.second.end, high)};
    }
  }

  __device__ __forceinline__ bool holds(int key, int keys) const {
    return first.holds(key, keys) || second.holds(key, keys);
  }
  __device__ __forceinline__ uint32_t bits(int key) const {
    return first.bits(key) | second.bits(key);
  }
};

// What the queries of a tile see, in 32 bytes.
struct alignas(16) TileBounds {
  KeySpan first;   // from the first key in their first ranges to the last
  KeySpan second;  // likewise
  KeySpan common;  // in the first range of each of them
  KeySpan unused;

  // Of the first `rows` of a tile at row `row` of a sequence, `global_row` of q. All 32 lanes of a
  // warp together.
  __device__ __forceinline__ static TileBounds of(const AttentionParams& params,
                                                  const WindowOf<int>& window, int64_t global_row,
                                                  int row, int rows, int num_keys) {
    constexpr unsigned kAll = 0xffffffffu;
    constexpr KeySpan kNone{INT_MAX, INT_MIN};
    KeySpan first = kNone, second = kNone, common = {0, INT_MAX};
    for (int index = threadIdx.x % 32; index < rows; index += 32) {
      const VisibleKeys visible(params, window, global_row + index, row + index, num_keys);
      widen(first, visible.first);
      widen(second, visible.second);
      common.begin = max(common.begin, visible.first.begin);
      common.end = min(common.end, visible.first.end);
    }
    return {{__reduce_min_sync(kAll, first.begin), __reduce_max_sync(kAll, first.end)},
            {__reduce_min_sync(kAll, second.begin), __reduce_max_sync(kAll, second.end)},
            {__reduce_max_sync(kAll, common.begin), __reduce_min_sync(kAll, common.end)},
            {0, 0}};
  }

 private:
  __device__ __forceinline__ static void widen(KeySpan& all, const KeySpan& span) {
    if (span.is_empty()) return;
    all.begin = min(all.begin, span.begin);
    all.end = max(all.end, span.end);
  }
};
static_assert(sizeof(TileBounds) == kTileBoundsBytes);

// Those of the tiles of kRows queries of sequence `seq`, whose rows begin at `begin` in q: by the
// numbers that find_tile() gives them.
template <int kRows>
__device__ __forceinline__ TileBounds* tile_bounds(const AttentionBackwardParams& params,
                                                   int64_t begin, int64_t seq) {
  return static_cast<TileBounds*>(params.tile_bounds) + begin / kRows + seq + 1;
}

// The steps of kStep keys that a tile of queries walks over: those in [first, gap) and [behind,
// last), where first, gap and behind are multiples of kStep.
template <int kStep>
struct VisibleSteps {
  int first;
  int gap;
  int behind;
  int last;

  __device__ __forceinline__ explicit VisibleSteps(const TileBounds* gBounds) {
    const int4 spans = __ldcg(reinterpret_cast<const int4*>(gBounds));
    KeySpan low{spans.x, spans.y}, high{spans.z, spans.w};
    if (low.is_empty() || (!high.is_empty() && high.begin < low.begin)) {
      low = {spans.z, spans.w};
      high = {spans.x, spans.y};
    }
    if (low.is_empty()) {
      first = gap = behind = last = 0;
      return;
    }
    first = low.begin / kStep * kStep;
    gap = (low.end + kStep - 1) / kStep * kStep;
    behind = high.begin / kStep * kStep;
    last = high.is_empty() ? low.end : max(low.end, high.end);
    if (high.is_empty() || behind <= gap) gap = behind = last;  // they are one
  }

  __device__ __forceinline__ bool any() const { return first < last; }
  __device__ __forceinline__ int next(int key) const {
    key += kStep;
    return key >= gap && key < behind ? behind : key;
  }
};

// The tiles of kRows queries of one sequence that see some of keys [key, key + keys), one after the
// other, by the bounds of all its tiles in memory. Its functions want all 32 lanes of a warp.
struct SeeingTiles {
  const TileBounds* bounds;
  int count;
  int key;
  int keys;
  int group;           // of 32 tiles, the first of it
  uint32_t left, cut;  // of the group: tiles not yet taken, and those that do not see all keys

  __device__ __forceinline__ SeeingTiles(const TileBounds* tile_bounds, int tiles, int first_key,
                                         int num_keys)
      : bounds(tile_bounds), count(tiles), key(first_key), keys(num_keys) {
    restart();
  }

  __device__ __forceinline__ void restart() {
    group = 0;
    look();
  }
  // The next tile, and whether it does not see all keys; `count` if there is none.
  __device__ __forceinline__ int next(bool& is_cut) {
    while (left == 0) {
      group += 32;
      if (group >= count) return count;
      look();
    }
    const int place = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    is_cut = cut >> place & 1;
    return group + place;
  }

 private:
  __device__ __forceinline__ void look() {
    constexpr unsigned kAll = 0xffffffffu;
    const int tile = group + static_cast<int>(threadIdx.x) % 32;
    bool sees = false, sees_all = false;
    if (tile < count) {
      const auto* g = reinterpret_cast<const int4*>(bounds + tile);
      const int4 spans = __ldcg(g), common = __ldcg(g + 1);
      sees =
          KeySpan{spans.x, spans.y}.meets(key, keys) || KeySpan{spans.z, spans.w}.meets(key, keys);
      sees_all = KeySpan{common.x, common.y}.holds(key, keys);
    }
    left = __ballot_sync(kAll, sees);
    cut = ~__ballot_sync(kAll, sees_all);
  }
};

// The hull of what a warp's rows see, of which each lane has two.
struct VisibleHull {
  int begin;
  int end;

  VisibleHull() = default;
  __device__ __forceinline__ explicit VisibleHull(const VisibleKeys (&visible)[2]) {
    int first = INT_MAX, last = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const KeySpan& span = which == 0 ? visible[half].first : visible[half].second;
        if (span.is_empty()) continue;
        first = min(first, span.begin);
        last = max(last, span.end);
      }
    }
    begin = __reduce_min_sync(0xffffffffu, first);
    end = __reduce_max_sync(0xffffffffu, last);
  }
  // Which of the four groups of 16 keys from `key` on lie outside.
  __device__ __forceinline__ unsigned hidden_groups(int key) const {
    if (begin <= key && key + 64 <= end) return 0;
    return (~bits_below((end - key + 15) / 16) | bits_below((begin - key) / 16)) & 0xf;
  }
};

// Scores of keys that their query does not see become `value`. Rows are queries, the two of this
// lane as `visible` says; columns are keys from `key` on.
template <int kBlocks>
__device__ __forceinline__ void replace_hidden(Accumulator<1, kBlocks>& s, float value,
                                               const VisibleKeys (&visible)[2], int key, int lane) {
  static_assert(kBlocks % 4 == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int word = 0; word < kBlocks / 4; ++word) {
      const uint32_t bits = visible[half].bits(key + word * 32) >> (2 * (lane % 4));
#pragma unroll
      for (int column = 0; column < 4 * 2; ++column) {
        const int block = column / 2, i = column % 2;
        if ((bits >> (block * 8 + i) & 1) == 0) s[0][word * 4 + block][2 * half + i] = value;
      }
    }
  }
}

// Which of a warp's 16 keys the queries of a step see, in the order in which a lane holds scores whose
// rows are keys and whose columns 64 queries.
struct SeenBy64 {
  uint32_t bits;  // of the queries `lane` and `lane` + 32, 16 each

  SeenBy64() = default;
  // `key` is the warp's first. The step is the first `rows` queries from row `row` of the sequence,
  // `global_row` of q, on; others see nothing. All 32 lanes together.
  __device__ __forceinline__ SeenBy64(const AttentionParams& params, const WindowOf<int>& window,
                                      int64_t global_row, int row, int rows, int num_keys, int key,
                                      int lane) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(lane + 32 * i, rows - 1);
      words[i] =
          VisibleKeys(params, window, global_row + query, row + query, num_keys).bits(key) & 0xffff;
      if (lane + 32 * i >= rows) words[i] = 0;
    }
    bits = words[0] | words[1] << 16;
  }

  // Which of the step's four groups of 16 queries see none of the keys.
  __device__ __forceinline__ unsigned hidden_groups() const {
    const unsigned low = __ballot_sync(0xffffffffu, (bits & 0xffff) != 0),
                   high = __ballot_sync(0xffffffffu, bits >> 16 != 0);
    return ((low & 0xffff) == 0 ? 1u : 0u) | (low >> 16 == 0 ? 2u : 0u) |
           ((high & 0xffff) == 0 ? 4u : 0u) | (high >> 16 == 0 ? 8u : 0u);
  }

  // What is not seen becomes 0.
  __device__ __forceinline__ void keep(Accumulator<1, 8>& s, int lane) const {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const Pair pair(bits, block, lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!pair.sees(i % 2, i / 2)) s[0][block + i / 4 * 4][i % 4] = 0.0f;
      }
    }
  }
  // The same of packed values; those beside them become `value`.
  template <typename Packed>
  __device__ __forceinline__ void keep(Packed& p, Accumulator<1, 8>& s, float value,
                                       int lane) const {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const Pair pair(bits, block, lane);
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        float (&own)[4] = s[0][block + half / 2 * 4];
        const bool sees[2] = {pair.sees(0, half), pair.sees(1, half)};
        p.keep(block + half / 2 * 4, half % 2, sees[0], sees[1]);
        if (!sees[0]) own[half % 2 * 2] = value;
        if (!sees[1]) own[half % 2 * 2 + 1] = value;
      }
    }
  }

 private:
  // Of this lane's two queries in block `block`, and in block `block` + 4.
  struct Pair {
    uint32_t own[2];

    __device__ __forceinline__ Pair(uint32_t bits, int block, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        own[i] = __shfl_sync(0xffffffffu, bits, block * 8 + 2 * (lane % 4) + i) >> (lane / 4);
    }
    // Query i; key `lane` / 4, or 8 further, of block `block`; then of block `block` + 4.
    __device__ __forceinline__ bool sees(int i, int half) const {
      return (own[i] >> (half * 8) & 1) != 0;
    }
  };
};

}  // namespace jagged_cuda::attention
