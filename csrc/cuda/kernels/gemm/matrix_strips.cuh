// How the CTAs of a persistent grid share the rows of A_b y_b, or A_b^T y_b, of all sequences, from
// offsets on the device alone: each takes strips of rows in order, of about equal weight, found by a
// binary search.
//
// Row i of sequence b, a sum of `depth` terms, begins at the weight
//     W + i (depth + kRowWeight),     W = beginning of the matrix + kRowWeight (its first row),
// so that W never decreases. A CTA takes the blocks of kBlockM rows that begin in its part of the
// weights, and makes strips of up to kTileM rows of them.
//
// Whatever the offsets, only strips within the result are taken, and no matrix is read that does not fit;
// with wrong ones some rows may be missing, or be taken twice.
#pragma once

#include "cuda/kernels/prim/matrices.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

// Rows of one sequence; is_end: there are no more.
struct MatrixStrip {
  int64_t first;  // of the elements of A: where the strip's rows, or columns if transposed, begin
  int pitch;      // of A
  int rows, depth;
  int out_row, y_row;  // of the whole tensors
  bool is_end;
};

template <int kTileM_, int kBlockM_, bool kTranspose_>
struct MatrixStrips {
  static constexpr int kTileM = kTileM_, kBlockM = kBlockM_;
  static constexpr bool kTranspose = kTranspose_;
  // What a row costs beside its terms, in terms.
  static constexpr int kRowWeight = 256;

  static __device__ __forceinline__ const OffsetsView& out_rows(const MatricesView& matrices) {
    return kTranspose ? matrices.columns : matrices.rows;
  }
  static __device__ __forceinline__ int64_t weight_of(const MatricesView& matrices, int64_t seq) {
    const int64_t value = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq);
    const int64_t offset = value < 0 ? 0 : value > matrices.capacity ? matrices.capacity : value;
    return offset + kRowWeight * clamped_offset(out_rows(matrices), seq);
  }

  // The smallest number of blocks that hold `distance`, each of weight `unit`, in rows.
  static __device__ __forceinline__ int64_t rows_to(int64_t distance, int64_t unit) {
    return distance <= 0 ? 0 : (distance + unit - 1) / unit * kBlockM;
  }

  // Calls take(strip) for each strip of part `part` of `parts`. All 32 lanes of a warp together.
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
      const RowRange &own_rows = kTranspose ? own.columns : own.rows,
                     &own_summed = kTranspose ? own.rows : own.columns;
      const int own_depth = own.fits ? static_cast<int>(own_summed.len) : 0;
      for (int i = 0; i < 32 && first_seq + i < num_seqs; ++i) {
        const auto of = [&](auto value) { return __shfl_sync(0xffffffffu, value, i); };
        const int64_t weight = of(own_weight);
        if (weight >= end) return;
        const int rows = of(static_cast<int>(own_rows.len)), depth = of(own_depth);
        MatrixStrip strip{of(own.begin),
                          of(static_cast<int>(own.columns.len)),
                          0,
                          depth,
                          of(static_cast<int>(own_rows.begin)),
                          of(static_cast<int>(own_summed.begin)),
                          false};
        const int64_t unit = kBlockM * (int64_t{depth} + kRowWeight);
        const int64_t from = rows_to(begin - weight, unit),
                      last = min(int64_t{rows}, rows_to(end - weight, unit));
        const int64_t first = strip.first;
        const int out_row = strip.out_row;
        for (int64_t row = from; row < last; row += kTileM) {
          strip.first = first + (kTranspose ? row : row * strip.pitch);
          strip.rows = static_cast<int>(min(int64_t{kTileM}, last - row));
          strip.out_row = out_row + static_cast<int>(row);
          take(strip);
        }
      }
    }
  }
};

}  // namespace jagged_cuda::gemm
