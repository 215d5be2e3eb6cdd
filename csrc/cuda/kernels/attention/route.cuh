// Which kernel takes a sequence, by its own length alone, so that its bits do not depend on its
// neighbours.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/jagged.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::attention {

__device__ __forceinline__ bool is_tiny(const AttentionParams& params, int64_t queries,
                                        int64_t keys) {
  return queries <= tiny_limit(params) && keys <= tiny_limit(params);
}

// Whether another kernel leaves a sequence to those for tiny ones, as it leaves to them the rows
// outside all sequences where params.split_by_length.
__device__ __forceinline__ bool left_to_tiny(const AttentionParams& params, int64_t queries,
                                             int64_t keys) {
  return params.split_by_length && is_tiny(params, queries, keys);
}

// Whether another kernel leaves a sequence to that for short ones.
__device__ __forceinline__ bool left_to_short(const AttentionParams& params, int64_t queries,
                                              int64_t keys) {
  return params.short_apart && queries <= kShortRows && keys <= kShortRows;
}

// Whether another kernel leaves a sequence to that for long ones.
__device__ __forceinline__ bool left_to_long(const AttentionParams& params, int64_t queries,
                                             int64_t keys) {
  const PlannedLengths& planned = params.planned;
  return params.long_plan != nullptr && queries > planned.above &&
         !(queries <= planned.spared && keys <= planned.spared);
}
// In the backward pass, where none are spared.
__device__ __forceinline__ bool left_to_long(const AttentionBackwardParams& params,
                                             int64_t queries) {
  return params.long_plan != nullptr && queries > params.planned.above;
}

// Whether takes(sequence) holds for any sequence, of up to some thousands; all kThreads of a CTA. So a kernel
// that likely has nothing to do knows it before its barriers are initialised and its roles' code is there.
template <int kThreads, typename Takes>
__device__ __forceinline__ bool any_sequence(const AttentionParams& params, Takes takes) {
  const int num_seqs = static_cast<int>(params.q_offsets.num_seqs);
  bool any = false;
#pragma unroll 1
  for (int seq = static_cast<int>(threadIdx.x); seq < num_seqs; seq += kThreads) any |= takes(seq);
  return __syncthreads_or(any);
}

// Whether no tile is left for a kernel behind those for tiny and short sequences. Where longer ones are
// this is known early; else the kernel waits until those before it are done.
__device__ __forceinline__ bool nothing_is_left(const AttentionParams& params) {
  const auto any_longer = [&] {
    return ptx::ld_acquire_gpu(params.longer + (params.short_apart ? 1 : 0)) == params.call_number;
  };
  if (params.longer == nullptr || any_longer()) return false;
  ptx::griddepcontrol_wait();
  return !any_longer();
}

// This CTA's tile in a grid of tile_grid(). There may be none: row >= rows.len.
template <int kTile>
__device__ __forceinline__ JaggedTile find_tile_of(const AttentionParams& params,
                                                   const OffsetsView& offsets) {
  return find_tile_or_longer<kTile>(offsets, params.longer_in_slabs ? tiny_limit(params) : 0,
                                    blockIdx.x);
}

// The tiles of longer sequences among those of this CTA in a grid of looped_grid(), where
// params.longer_in_slabs. All lanes of a warp. (Kernels have an instance of their own with this loop:
// around one tile it costs up to a tenth.)
template <int kTile>
class TilesOfCta {
 public:
  __device__ __forceinline__ TilesOfCta(const AttentionParams& params, const OffsetsView& offsets)
      : params_(params), offsets_(offsets), first_(static_cast<int>(blockIdx.x)) {}

  // False if there are no more. Two lanes look at the two tiles of a slab.
  __device__ __forceinline__ bool next(JaggedTile& tile) {
    // Of sequences that no kernel for shorter ones takes, if these take the same of queries and keys.
    const int limit = tiny_limit(params_), others = params_.short_apart ? kShortRows : limit,
              stride = static_cast<int>(gridDim.x), lane = static_cast<int>(threadIdx.x) % 32,
              num_slabs = static_cast<int>(num_longer_tiles(offsets_.total, limit) / 2);
    while (left_ == 0) {
      if (first_ >= num_slabs) return false;
      const int own = first_ + lane / 2 * stride;
      JaggedTile found = {-1, {0, 0}, 0};
      if (own < num_slabs)
        found = find_longer_tile_of_lane<kTile>(offsets_, limit, own * 2 + lane % 2);
      seq_ = static_cast<int>(found.seq);
      row_ = static_cast<int>(found.row);
      left_ = __ballot_sync(0xffffffffu,
                            seq_ >= 0 && found.row < found.rows.len && found.rows.len > others);
      first_ += 16 * stride;
    }
    const int source = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    tile.seq = __shfl_sync(0xffffffffu, seq_, source);
    tile.row = __shfl_sync(0xffffffffu, row_, source);
    tile.rows = sequence_rows(offsets_, tile.seq);
    return true;
  }

 private:
  const AttentionParams& params_;
  const OffsetsView& offsets_;
  int first_;  // of 16 slabs to look at next
  unsigned left_ = 0;
  int seq_, row_;
};

// The tiles of sequences of more than kLimit rows among those of this CTA. All lanes of a warp; a lane
// looks at one sequence of every 32.
template <int kTile, int kLimit>
class LongTilesOfCta {
 public:
  __device__ __forceinline__ explicit LongTilesOfCta(const OffsetsView& offsets)
      : offsets_(offsets) {}

  // False if there are no more. Tiles are counted over all such sequences, and every n-th is this CTA's.
  __device__ __forceinline__ bool next(JaggedTile& tile) {
    const int stride = static_cast<int>(gridDim.x), lane = static_cast<int>(threadIdx.x) % 32;
    while (row_ >= rows_.len) {
      while (left_ == 0) {
        if (++group_ == kGroups) {
          if (first_ >= offsets_.num_seqs) return false;
#pragma unroll
          for (int i = 0; i < kGroups; ++i) {
            const int64_t own = first_ + i * 32 + lane;
            const unsigned found = __ballot_sync(
                0xffffffffu, own < offsets_.num_seqs && sequence_rows(offsets_, own).len > kLimit);
            if (lane == i) found_ = found;
          }
          first_ += kGroups * 32;
          group_ = 0;
        }
        left_ = __shfl_sync(0xffffffffu, found_, group_);
      }
      seq_ = first_ - (kGroups - group_) * 32 + __ffs(static_cast<int>(left_)) - 1;
      left_ &= left_ - 1;
      rows_ = sequence_rows(offsets_, seq_);
      row_ = int64_t{(static_cast<int>(blockIdx.x) + stride - before_) % stride} * kTile;
      before_ = static_cast<int>((before_ + (rows_.len + kTile - 1) / kTile) % stride);
    }
    tile = {seq_, rows_, row_};
    row_ += int64_t{stride} * kTile;
    return true;
  }

 private:
  static constexpr int kGroups = 8;  // loads in flight

  const OffsetsView& offsets_;
  int64_t first_ = 0;  // of the groups of sequences to look at next
  int group_ = kGroups - 1;
  unsigned found_, left_ = 0;
  int64_t seq_, row_ = 0;
  RowRange rows_ = {0, 0};
  int before_ = 0;  // tiles, modulo the number of CTAs
};

// This CTA's tiles of those sequences that takes(length) says, of which each may have `of_sequence`.
// All lanes of a warp; a lane looks at one.
template <int kTile>
class TilesBySequence {
 public:
  __device__ __forceinline__ explicit TilesBySequence(const OffsetsView& offsets)
      : offsets_(offsets), first_(blockIdx.x) {}

  // False if there are no more.
  template <typename Takes>
  __device__ __forceinline__ bool next(JaggedTile& tile, int64_t of_sequence, Takes takes) {
    const int64_t count = offsets_.num_seqs * of_sequence;
    while (left_ == 0) {
      if (first_ >= count) return false;
      own_ = first_ + int64_t{threadIdx.x % 32} * gridDim.x;
      bool found = false;
      if (own_ < count) {
        const int64_t len = sequence_rows(offsets_, own_ / of_sequence).len;
        found = takes(len) && own_ % of_sequence * kTile < len;
      }
      left_ = __ballot_sync(0xffffffffu, found);
      first_ += int64_t{32} * gridDim.x;
    }
    const int source = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    const int64_t index = __shfl_sync(0xffffffffu, own_, source);
    tile.seq = index / of_sequence;
    tile.row = index % of_sequence * kTile;
    tile.rows = sequence_rows(offsets_, tile.seq);
    return true;
  }

 private:
  const OffsetsView& offsets_;
  int64_t first_;  // of 32 tiles to look for next
  unsigned left_ = 0;
  int64_t own_ = 0;
};

// The tiles of sequences of up to kMost rows, and of the rows outside all sequences, among those of this
// CTA, in self-attention. All lanes of a warp.
template <int kTile, int kMost>
class ShorterTilesOfCta {
 public:
  __device__ __forceinline__ ShorterTilesOfCta(const AttentionParams& params,
                                               const OffsetsView& offsets)
      : params_(params), offsets_(offsets), tiles_(offsets), outside_(blockIdx.x) {}

  // False if there are no more.
  __device__ __forceinline__ bool next(JaggedTile& tile) {
    const auto takes = [&](int64_t len) {
      return len <= kMost && !left_to_tiny(params_, len, len) && !left_to_short(params_, len, len);
    };
    return tiles_.next(tile, (kMost + kTile - 1) / kTile, takes) || next_outside(tile);
  }

 private:
  __device__ __forceinline__ bool next_outside(JaggedTile& tile) {
    if (params_.split_by_length) return false;  // those for tiny sequences take them
    const int64_t begin = clamped_offset(offsets_, 0),
                  end = clamped_offset(offsets_, offsets_.num_seqs),
                  before = (begin + kTile - 1) / kTile;
    tile.seq = -1;
    tile.rows = outside_ < before ? RowRange{0, begin} : RowRange{end, offsets_.total - end};
    tile.row = (outside_ < before ? outside_ : outside_ - before) * kTile;
    outside_ += gridDim.x;
    return tile.row < tile.rows.len;
  }

  const AttentionParams& params_;
  const OffsetsView& offsets_;
  TilesBySequence<kTile> tiles_;
  int64_t outside_;
};

// Calls visit(tile) for each of a CTA's tiles in all of its threads. One warp searches: the loads of a
// search meet no line twice.
template <typename Tiles, typename Visit>
__device__ __forceinline__ void visit_tiles(Tiles tiles, JaggedTile& shared_tile, Visit visit) {
  for (;;) {
    if (threadIdx.x < 32) {
      JaggedTile tile;
      if (!tiles.next(tile)) tile.row = -1;
      if (threadIdx.x == 0) shared_tile = tile;
    }
    __syncthreads();
    const JaggedTile tile = shared_tile;
    if (tile.row < 0) return;
    visit(tile);
    __syncthreads();  // before the next tile's copies
  }
}

}  // namespace jagged_cuda::attention
