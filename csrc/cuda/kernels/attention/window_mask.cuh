// Which keys the rows of an item see where a window and the lengths decide it alone: the Mask of the
// forward kernel for long sequences (long_forward.cuh; with ranges of keys it is RangesMask of
// ranged_forward.cuh).
//
// A step is kTileN keys. Most steps are seen by all 64 rows of a warpgroup. Those that are *cut*, at the
// window's edges and at the sequence's end, have their unseen scores replaced one by one.
#pragma once

#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/tiles.cuh"

namespace jagged_cuda::attention {

// As a warpgroup sees it that computes the 64 rows from `first_row` of the tile on. What few steps need,
// those that are cut, is read again from `tile`, which lies in shared memory: registers are full.
template <int kTileN, bool kPacked>
class WindowMask {
 public:
  // Of an item, found by the scheduler: the keys that the tile walks over; those that are not cut for
  // the first warpgroup's rows begin at `uncut`, and its first row sees none from `unseen` on.
  struct alignas(16) Shared {
    int first;
    int last;
    int uncut;
    int unseen;
  };
  static constexpr bool kPrepared = false;  // Shared, by another warp of producers

  __device__ __forceinline__ static Shared find(const AttentionParams& params,
                                                const QueryTile& packed) {
    QueryTile tile = packed;
    tile.row >>= params.packed_shift;
    tile.rows >>= params.packed_shift;
    const WindowOf<int> window = window_of(params, tile);
    const KeyRange keys(tile, window, kTileN);
    const int first = tile.row + window.diagonal;
    return {keys.first, keys.last, first + (63 >> params.packed_shift) - window.before,
            first + window.after + 1};
  }

  __device__ __forceinline__ WindowMask(const AttentionParams& params, const QueryTile& tile,
                                        const Shared& shared, int first_row = 0)
      : params_(params),
        tile_(tile),
        found_(shared),
        first_uncut_(found_.uncut + query_of(first_row)),
        last_uncut_(min(found_.unseen + query_of(first_row), tile.num_keys) - kTileN) {}

  // The steps of keys: from first() on next(), before last().
  __device__ __forceinline__ int first() const { return found_.first; }
  __device__ __forceinline__ int next(int key) const { return key + kTileN; }
  __device__ __forceinline__ int last() const { return found_.last; }
  // Behind the last key that a warpgroup's rows see, at least first() + 1.
  __device__ __forceinline__ int own_last(int warpgroup) const {
    return own_last_key(tile_, window(), KeyRange(tile_, window(), kTileN), warpgroup * 64);
  }
  __device__ __forceinline__ bool cuts(int key) const {
    return key < first_uncut_ || key > last_uncut_;
  }
  // Whether all is seen of a step, as far as that is known before its scores are there.
  __device__ __forceinline__ bool is_uncut(int, int) const { return false; }
  // Scores of keys from `key` on that this lane's rows, of which own_row() is the first, do not see
  // become `value`.
  template <int kBlocks, typename OwnRow>
  __device__ __forceinline__ void hide(Accumulator<1, kBlocks>& s, float value, bool, int key,
                                       int warpgroup, OwnRow own_row, int lane) const {
    if (!cuts(key)) return;
    const WindowOf<int> seen = window();
    const int row = tile_.row + own_row();
    const int rows[2] = {query_of(row), query_of(row + 8)};
    if (seen.first_column(query_of(tile_.row + warpgroup * 64 + 63)) > key) {
      replace_unseen(s[0], value, seen, rows, key, tile_.num_keys, lane);
    } else {
      replace_behind(s[0], value, seen, rows, key, tile_.num_keys, lane);
    }
  }

 private:
  __device__ __forceinline__ WindowOf<int> window() const { return window_of(params_, tile_); }
  __device__ __forceinline__ int query_of(int row) const {
    return kPacked ? row >> params_.packed_shift : row;
  }

  const AttentionParams& params_;
  const QueryTile& tile_;
  const Shared found_;
  const int first_uncut_;  // first keys of steps that are not cut
  const int last_uncut_;
};

}  // namespace jagged_cuda::attention
