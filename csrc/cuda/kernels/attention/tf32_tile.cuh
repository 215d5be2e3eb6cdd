// Tiles of f32 for mma.sync in TF32: the counterpart of mma_tile.cuh, whose addresses and loads it
// takes. Products round their operands to TF32. Compensated, each operand has a big part of 11 bits
// and a rest of 12: big * big is summed in TF32, and big * rest + rest * big apart from it, as one
// product in bf16 of twice the depth, where each element has two neighbouring places.
//
// A chunk has 4 elements, and ldmatrix moves 16 bytes of 8 rows whatever they hold: what it gives a
// lane of 16-bit pairs are here the single elements that mma.m16n8k8 wants.
//
// P and dS go from accumulator to operand without leaving registers: a lane holds columns 2c and
// 2c + 1 of eight (c = lane % 4) where the operand wants c and c + 4. The order of the terms of a sum
// is free, so the other operand's rows are read in that order. So is the order of its columns: a
// lane reads four neighbours at once, for four products, and a result's columns are those of
// column_of().
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/prim/round_tf32.cuh"

#include <cmath>

namespace jagged_cuda {

// A [kRows, kColumns] tile. Chunks are exchanged within groups of 8, as in SharedTile.
template <int kRows_, int kColumns_>
struct SharedTileF32 {
  using Element = float;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunkElems = 4;
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunks = kColumns / kChunkElems;
  static constexpr int kRowBytes = kColumns * 4;
  static constexpr int kSwizzleBytes = 8 * kChunkBytes;
  static_assert(kChunks % 8 == 0, "the swizzle is written for these rows");

  alignas(128) float data[kRows * kColumns];

  __device__ __forceinline__ static int swizzle(int row) { return row & 7; }
  __device__ __forceinline__ float* chunk(int row, int index) {
    return data + row * kColumns + (index ^ swizzle(row)) * kChunkElems;
  }
};

// Rounds to TF32 what this thread has copied by load_tile, once it has arrived and before others
// read it: then each element is rounded once, and not by each warp.
template <int kThreads, typename Tile>
__device__ __forceinline__ void round_own_chunks(Tile& tile) {
  constexpr int kRowStep = kThreads / Tile::kChunks;
  const int first_row = static_cast<int>(threadIdx.x) / Tile::kChunks,
            chunk = static_cast<int>(threadIdx.x) % Tile::kChunks;
#pragma unroll 4
  for (int row = first_row; row < Tile::kRows; row += kRowStep) {
    auto* elements = reinterpret_cast<float4*>(tile.chunk(row, chunk));
    const float4 whole = *elements;
    *reinterpret_cast<uint4*>(elements) = make_uint4(round_tf32(whole.x), round_tf32(whole.y),
                                                     round_tf32(whole.z), round_tf32(whole.w));
  }
}

// The sum of both products. An infinite operand makes the small one NaN, so it counts only where the
// big one is finite.
__device__ __forceinline__ float sum_of_parts(float big, float small) {
  return isfinite(big) ? big + small : big;
}

// One operand's fragment; with kCompensated, once it is split, `both` has each element and its rest
// in bf16: an A operand in this order, a B operand in the other, so that their product is that of
// one's element with the other's rest.
template <bool kCompensated, bool kIsA, int kRegisters>
struct Fragment {
  uint32_t big[kRegisters];
  uint32_t both[kCompensated ? kRegisters : 1];

  // A NaN may become a zero in `big`; it stays one in `both`.
  __device__ __forceinline__ void split() {
    if constexpr (kCompensated) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        const float whole = __uint_as_float(big[i]);
        big[i] = (big[i] + 0x1000) & ~0x1fffu;
        const float rest = whole - __uint_as_float(big[i]);
        both[i] = pack<__nv_bfloat16>(kIsA ? whole : rest, kIsA ? rest : whole);
      }
    }
  }
};

// big += a b, and small += what the rests of a and b give beside. Of b registers `first` and
// `second`.
template <bool kCompensated, int kRegisters>
__device__ __forceinline__ void mma_parts(float (&big)[4], float (&small)[4],
                                          const Fragment<kCompensated, true, 4>& a,
                                          const Fragment<kCompensated, false, kRegisters>& b,
                                          int first, int second) {
  ptx::mma_m16n8k8_tf32(big, a.big, b.big[first], b.big[second]);
  if constexpr (kCompensated)
    ptx::mma_m16n8k16<__nv_bfloat16>(small, a.both, b.both[first], b.both[second]);
}

// s = a b^T: a the rows of a warp, b the first kBlocks * 8 rows of another tile from
// LaneAddress::by_columns on; the columns are summed over. Without kCompensated both are rounded.
template <bool kCompensated, int kRowBlocks, int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_rows_by_rows(Accumulator<kRowBlocks, kBlocks>& s,
                                                      LaneAddress<ATile> a_rows,
                                                      LaneAddress<BTile> b_rows) {
  Accumulator<kRowBlocks, kBlocks> small;
#pragma unroll
  for (int i = 0; i < kRowBlocks * kBlocks * 4; ++i) {
    s[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] = 0.0f;
    small[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] = 0.0f;
  }
  constexpr int kGroup = ATile::kSwizzleBytes / 4;
#pragma unroll 1
  for (int group = 0; group < ATile::kColumns; group += kGroup) {
#pragma unroll
    for (int k = 0; k < kGroup; k += 8) {
      Fragment<kCompensated, true, 4> a[kRowBlocks];
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        ptx::ldmatrix_x4(a[r].big, a_rows.block(r * 16, k));
        a[r].split();
      }
#pragma unroll
      for (int block = 0; block < kBlocks; block += 2) {
        Fragment<kCompensated, false, 4> b;
        ptx::ldmatrix_x4(b.big, b_rows.block(block * 8, k));
        b.split();
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          mma_parts(s[r][block], small[r][block], a[r], b, 0, 1);
          mma_parts(s[r][block + 1], small[r][block + 1], a[r], b, 2, 3);
        }
      }
    }
    a_rows.base += ATile::kSwizzleBytes;
    b_rows.base += BTile::kSwizzleBytes;
  }
  if constexpr (kCompensated) {
#pragma unroll
    for (int i = 0; i < kRowBlocks * kBlocks * 4; ++i) {
      float& sum = s[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4];
      sum = sum_of_parts(sum, small[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4]);
    }
  }
}

// Where a lane reads columns of a tile: rows 2c and 2c + 1 of eight, four columns of 32.
template <typename Tile>
struct ColumnAddress {
  uint32_t base[2];

  __device__ __forceinline__ ColumnAddress(Tile& tile, int lane, int first_column = 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i;
      base[i] = ptx::shared_address(tile.chunk(row, lane / 4)) + first_column * 4;
    }
  }

  // Of the eight rows from `row` and the 32 columns from `column` on, multiples of 8 and 32: register
  // i of `first` and `second` are an operand of columns 4 n + i, n = 0 ... 7.
  __device__ __forceinline__ void read(uint32_t (&b)[8], int row, int column) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four =
          ptx::ld_shared_16(ptx::SharedAddress(base[i] + row * Tile::kRowBytes + column * 4));
      b[4 * i] = four.x, b[4 * i + 1] = four.y, b[4 * i + 2] = four.z, b[4 * i + 3] = four.w;
    }
  }
};

// The columns of a lane's elements in what multiply_by_columns() has summed: element i of block b.
__device__ __forceinline__ int column_of(int block, int i, int lane) {
  return block / 4 * 32 + (lane % 4 * 2 + i % 2) * 4 + block % 4;
}

// Eight columns of p as an A operand.
template <bool kCompensated>
__device__ __forceinline__ Fragment<kCompensated, true, 4> operand_of(const float (&p)[4]) {
  Fragment<kCompensated, true, 4> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = p[i % 2 * 2 + i / 2];
    a.big[i] = kCompensated ? __float_as_uint(element) : round_tf32(element);
  }
  a.split();
  return a;
}

// o += p b: p in registers, b kBlocks * 8 rows and kOutBlocks * 8 columns.
template <int kRowBlocks, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void multiply_by_rounded_columns(
    Accumulator<kRowBlocks, kOutBlocks>& o, const Accumulator<kRowBlocks, kBlocks>& p,
    const ColumnAddress<BTile>& b_columns) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    Fragment<false, true, 4> a[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) a[r] = operand_of<false>(p[r][block]);
#pragma unroll
    for (int first = 0; first < kOutBlocks; first += 4) {
      Fragment<false, false, 8> b;
      b_columns.read(b.big, block * 8, first * 8);
#pragma unroll
      for (int i = 0; i < 4 * kRowBlocks; ++i) {
        float (&sum)[4] = o[i % kRowBlocks][first + i / kRowBlocks];
        mma_parts(sum, sum, a[i % kRowBlocks], b, i / kRowBlocks, i / kRowBlocks + 4);
      }
    }
  }
}

// The same compensated. Tensor cores truncate as they add: sums begin anew at each call, and are
// added rounded.
template <int kRowBlocks, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void multiply_by_whole_columns(Accumulator<kRowBlocks, kOutBlocks>& o,
                                                          const Accumulator<kRowBlocks, kBlocks>& p,
                                                          const ColumnAddress<BTile>& b_columns) {
  Fragment<true, true, 4> a[kRowBlocks][kBlocks];
#pragma unroll
  for (int i = 0; i < kRowBlocks * kBlocks; ++i)
    a[i / kBlocks][i % kBlocks] = operand_of<true>(p[i / kBlocks][i % kBlocks]);
#pragma unroll
  for (int first = 0; first < kOutBlocks; first += 4) {
    float sum[kRowBlocks][4][4] = {}, small[kRowBlocks][4][4] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      Fragment<true, false, 8> b;
      b_columns.read(b.big, block * 8, first * 8);
      b.split();
#pragma unroll
      for (int column = 0; column < 4; ++column) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r)
          mma_parts(sum[r][column], small[r][column], a[r][block], b, column, column + 4);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowBlocks * 16; ++i) {
      o[i / 16][first + i / 4 % 4][i % 4] +=
          sum_of_parts(sum[i / 16][i / 4 % 4][i % 4], small[i / 16][i / 4 % 4][i % 4]);
    }
  }
}

template <bool kCompensated, int kRowBlocks, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void multiply_by_columns(Accumulator<kRowBlocks, kOutBlocks>& o,
                                                    const Accumulator<kRowBlocks, kBlocks>& p,
                                                    const ColumnAddress<BTile>& b_columns) {
  static_assert(kOutBlocks % 4 == 0);
  if constexpr (kCompensated) {
    multiply_by_whole_columns(o, p, b_columns);
  } else {
    multiply_by_rounded_columns(o, p, b_columns);
  }
}

// Writes a warp's rows, each times its scale[row block][half], from the registers of
// multiply_by_columns(). `g` is the row of this lane's first half and the first column, `rows` and
// `columns` what exists from there on.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void store_columns(const Accumulator<kRowBlocks, kBlocks>& o,
                                              const float (&scale)[kRowBlocks][2], float* g,
                                              int64_t row_stride, int rows, int columns,
                                              bool aligned, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (16 * r + 8 * half >= rows) continue;
      float* row = g + (16 * r + 8 * half) * row_stride;
#pragma unroll
      for (int first = 0; first < kBlocks; first += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = column_of(first, i, lane);
          float four[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) four[e] = o[r][first + e][2 * half + i] * scale[r][half];
          if (aligned) {
            if (column < columns) {
              ptx::st_global_16(row + column,
                                make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                           __float_as_uint(four[2]), __float_as_uint(four[3])));
            }
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (column + e < columns) row[column + e] = four[e];
            }
          }
        }
      }
    }
  }
}

}  // namespace jagged_cuda
