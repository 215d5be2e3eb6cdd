#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/matrices.cuh"
#include "cuda/kernels/prim/ring.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

#ifndef SW
#define SW 0
#endif
constexpr int64_t kSequenceWeight = SW;

// A place in a ring that moves by more than one.
template <int kSlots>
struct Place {
  int slot = 0, parity = 0;
  __device__ __forceinline__ void advance(int by) {
    slot += by;
    while (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
};

// Neighbouring blocks of one matrix's lines that share a tile of its columns.
struct BlockRange {
  int64_t begin;  // of the matrix
  RowRange rows, columns;
  bool fits;
  int tile, block, count;
};

// How many blocks and tiles a matrix has.
struct Units {
  int blocks, tiles;
};

// Calls take(range) for each range of this CTA.
template <typename UnitsOf, typename Take>
__device__ __forceinline__ void walk_blocks(const MatricesView& matrices, const OffsetsView& lines,
                                            int64_t line_weight, int max_count, UnitsOf units_of,
                                            Take take) {
  const int lane = threadIdx.x % 32;
  const int64_t num_seqs = matrices.rows.num_seqs;
  const auto weight_of = [&](int64_t seq) {
    const int64_t value = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq);
    return (value < 0 ? 0 : value > matrices.capacity ? matrices.capacity : value) +
           line_weight * clamped_offset(lines, seq) + kSequenceWeight * seq;
  };
  const int64_t start = weight_of(0), total = weight_of(num_seqs) - start;
  if (total <= 0) return;
  const auto part_of = [&](int64_t part) {
    return start + total / gridDim.x * part + total % gridDim.x * part / gridDim.x;
  };
  const int64_t begin = part_of(blockIdx.x), end = part_of(blockIdx.x + 1);
  // weight(low) <= begin < weight(high)
  int64_t low = 0, high = num_seqs;
  while (high - low > 1) {
    const int64_t step = (high - low + 32) / 33;
    const int64_t probe = low + step * (lane + 1);
    const bool before = probe < high && weight_of(probe) <= begin;
    const int64_t passed = __popc(__ballot_sync(0xffffffffu, before));
    low += step * passed;
    high = high < low + step ? high : low + step;
  }
  for (int64_t first_seq = low; first_seq < num_seqs; first_seq += 32) {
    const int64_t own_seq = first_seq + lane < num_seqs ? first_seq + lane : num_seqs - 1;
    const Matrix own = find_matrix(matrices, own_seq);
    const int64_t own_weight = weight_of(own_seq), own_end = weight_of(own_seq + 1);
    // The units of this lane's matrix that begin in this CTA's part.
    const Units own_units = units_of(own);
    const double units = static_cast<double>(own_units.blocks) * own_units.tiles;
    const double scale = units / static_cast<double>(own_end - own_weight);
    const auto unit_at = [&](int64_t weight) {
      if (weight >= own_end) return static_cast<int64_t>(units);
      if (weight <= own_weight) return int64_t{0};
      return static_cast<int64_t>(ceil(static_cast<double>(weight - own_weight) * scale));
    };
    const int64_t own_first = unit_at(begin), own_last = unit_at(end);
    for (int i = 0; i < 32 && first_seq + i < num_seqs; ++i) {
      const auto of = [&](auto value) { return __shfl_sync(0xffffffffu, value, i); };
      if (of(own_weight) >= end) return;
      int64_t unit = of(own_first);
      const int64_t last = of(own_last);
      if (unit >= last) continue;
      const int blocks = of(own_units.blocks);
      BlockRange range{of(own.begin),
                       {of(own.rows.begin), of(own.rows.len)},
                       {of(own.columns.begin), of(own.columns.len)},
                       of(static_cast<int>(own.fits)) != 0,
                       0,
                       0,
                       0};
      do {
        range.tile = static_cast<int>(unit / blocks);
        range.block = static_cast<int>(unit % blocks);
        range.count = static_cast<int>(min(min(last - unit, int64_t{blocks - range.block}),
                                           static_cast<int64_t>(max_count)));
        take(range);
        unit += range.count;
      } while (unit < last);
    }
  }
}

}  // namespace jagged_cuda::gemm
