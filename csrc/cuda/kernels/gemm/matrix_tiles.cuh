// How the CTAs of a persistent grid share the tiles of all matrices, from offsets on the device
// alone: each takes a range of them in order, of about equal weight, found by a binary search.
//
// The tiles of a matrix [L, P] are strips of kTileM rows (the last one of fewer), cut every kTileN
// columns. Row i of the matrix begins at the weight
//     W + i (P + kRowWeight),     W = beginning of the matrix + kRowWeight (its first row of x),
// so that W never decreases, and a tile of r rows begins r kTileN behind the one before it in its
// strip. A CTA takes the tiles that begin in its part of the weights. Where a strip is a single tile
// it may be cut between blocks of kBlockM rows.
//
// Whatever the offsets, only tiles within matrices that fit are taken; with wrong ones some may be
// missing, or be taken twice.
#pragma once

#include "cuda/kernels/prim/matrices.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

// A tile of one matrix; is_end: there are no more.
struct MatrixTile {
  int64_t first;  // its first element in the result
  int pitch;
  int rows, columns;
  int x_row, y_row;  // of the whole tensors
  bool is_end;
};

template <int kTileM_, int kBlockM_, int kTileN_>
struct MatrixTiles {
  static constexpr int kTileM = kTileM_, kBlockM = kBlockM_, kTileN = kTileN_;
  // What a row costs beside its elements, in elements.
  static constexpr int kRowWeight = 128;

  static __device__ __forceinline__ int64_t offset_of(const MatricesView& matrices, int64_t seq) {
    const int64_t value = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq);
    return value < 0 ? 0 : value > matrices.capacity ? matrices.capacity : value;
  }
  static __device__ __forceinline__ int64_t weight_of(const MatricesView& matrices, int64_t seq) {
    return offset_of(matrices, seq) + kRowWeight * clamped_offset(matrices.rows, seq);
  }

  // The smallest count with count * unit >= distance.
  static __device__ __forceinline__ int64_t count_to(int64_t distance, int64_t unit) {
    return distance <= 0 ? 0 : (distance + unit - 1) / unit;
  }

  // Calls take(tile) for each tile of part `part` of `parts`. All 32 lanes of a warp together.
  template <typename Take>
  static __device__ __forceinline__ void walk(const MatricesView& matrices, int part, int parts,
                                              Take take) {
    const int lane = threadIdx.x % 32;
    const int64_t num_seqs = matrices.rows.num_seqs, start = weight_of(matrices, 0);
    const int64_t total = weight_of(matrices, num_seqs) - start;
    if (total <= 0) return;
    const int64_t begin = start + total / parts * part + total % parts * part / parts;
    const int64_t end = start + total / parts * (part + 1) + total % parts * (part + 1) / parts;
    // weight(low) <= begin < weight(high)
    int64_t low = 0, high = num_seqs;
    while (high - low > 1) {
      const int64_t step = (high - low + 32) / 33;
      const int64_t probe = low + step * (lane + 1);
      const bool before = probe < high && weight_of(matrices, probe) <= begin;
      const int64_t passed = __popc(__ballot_sync(0xffffffffu, before));
      low += step * passed;
      high = high < low + step ? high : low + step;
    }
    for (int64_t first_seq = low; first_seq < num_seqs; first_seq += 32) {
      const int64_t own_seq = first_seq + lane < num_seqs ? first_seq + lane : num_seqs - 1;
      const Matrix own = find_matrix(matrices, own_seq);
      const int64_t own_weight = weight_of(matrices, own_seq);
      const bool own_has = own.fits && own.rows.len > 0 && own.columns.len > 0;
      for (int i = 0; i < 32 && first_seq + i < num_seqs; ++i) {
        const auto of = [&](auto value) { return __shfl_sync(0xffffffffu, value, i); };
        const int64_t weight = of(own_weight);
        if (weight >= end) return;
        if (!of(static_cast<int>(own_has))) continue;
        walk_matrix({of(own.begin), static_cast<int>(of(own.columns.len)),
                     static_cast<int>(of(own.rows.len)), 0, static_cast<int>(of(own.rows.begin)),
                     static_cast<int>(of(own.columns.begin)), false},
                    weight, begin, end, take);
      }
    }
  }

 private:
  // `matrix` has the number of its rows in place of those of a tile.
  template <typename Take>
  static __device__ __forceinline__ void walk_matrix(const MatrixTile& matrix, int64_t weight,
                                                     int64_t begin, int64_t end, Take take) {
    const int len = matrix.rows, pitch = matrix.pitch;
    const int64_t row_weight = int64_t{pitch} + kRowWeight;
    const auto take_at = [&](int row, int rows, int column, int columns) {
      MatrixTile tile = matrix;
      tile.first += int64_t{row} * pitch + column;
      tile.rows = rows;
      tile.columns = columns;
      tile.x_row += row;
      tile.y_row += column;
      take(tile);
    };
    if (pitch <= kTileN) {
      const int64_t unit = kBlockM * row_weight;
      const int64_t first = weight >= begin ? 0 : count_to(begin - weight, unit) * kBlockM;
      const int64_t behind =
          weight + len * row_weight <= end ? len : count_to(end - weight, unit) * kBlockM;
      const int last = static_cast<int>(behind < len ? behind : len);
      for (int64_t row = first; row < last; row += kTileM) {
        take_at(static_cast<int>(row), min(kTileM, last - static_cast<int>(row)), 0, pitch);
      }
      return;
    }
    const int64_t strip_weight = kTileM * row_weight;
    const int strips = (len + kTileM - 1) / kTileM, tiles = (pitch + kTileN - 1) / kTileN;
    const int64_t first = weight >= begin ? 0 : (begin - weight) / strip_weight;
    for (int64_t strip = first; strip < strips; ++strip) {
      const int64_t strip_begin = weight + strip * strip_weight;
      if (strip_begin >= end) return;
      const int row = static_cast<int>(strip) * kTileM, rows = min(kTileM, len - row);
      const int64_t unit = int64_t{rows} * kTileN;
      const int64_t behind = count_to(end - strip_begin, unit);
      const int last = behind < tiles ? static_cast<int>(behind) : tiles;
      for (int64_t tile = count_to(begin - strip_begin, unit); tile < last; ++tile) {
        const int column = static_cast<int>(tile) * kTileN;
        take_at(row, rows, column, min(kTileN, pitch - column));
      }
    }
  }
};

}  // namespace jagged_cuda::gemm
