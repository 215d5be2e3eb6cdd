// Tiles of 16-bit elements for mma.sync: shared memory with a swizzle, loads that zero what lies outside, fragments, and the
// products of one warp's 16 rows.
#pragma once

#include "kernels/prim/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jagged_cuda {

constexpr int kWarpRows = 16;  // rows of a warp's mma.sync tile

// A [kRows, kColumns] tile in 16-byte chunks of 8 elements. Chunks are exchanged within groups of 8 so that the 8 rows that
// ldmatrix reads at once lie in 8 different groups of 4 banks.
template <typename Element, int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunkElems = 8;
  static constexpr int kChunks = kColumns / kChunkElems;
  static_assert(sizeof(Element) == 2 && (kChunks == 4 || kChunks % 8 == 0), "the swizzle is written for these rows");

  alignas(128) Element data[kRows * kColumns];

  __device__ __forceinline__ Element* chunk(int row, int index) {
    const int swizzled = kChunks == 4 ? index ^ ((row >> 1) & 3) : index ^ (row & 7);
    return data + row * kColumns + swizzled * kChunkElems;
  }

  // The address that lane `lane` gives to ldmatrix for the 16x16 block at (row, column), in the order of an A operand: quarters
  // (0, 0), (1, 0), (0, 1), (1, 1). Transposed, the same order is that of two B operands of PV.
  __device__ __forceinline__ Element* quarter_by_rows(int row, int column, int lane) {
    return chunk(row + lane % 16, column / kChunkElems + lane / 16);
  }
  // Quarters (0, 0), (0, 1), (1, 0), (1, 1): two B operands of QK^T.
  __device__ __forceinline__ Element* quarter_by_columns(int row, int column, int lane) {
    return chunk(row + lane / 16 * 8 + lane % 8, column / kChunkElems + lane / 8 % 2);
  }
};

// Rows [0, rows) and columns [0, columns) of a row-major operand in global memory; the rest of the tile becomes zeros, so that
// nothing of a neighbouring sequence, not even NaN, reaches a product. `aligned` rows go through cp.async (the caller commits
// and waits), others element by element.
template <int kThreads, typename Tile, typename Element>
__device__ __forceinline__ void load_tile(Tile& tile, const Element* g, int64_t row_stride, int rows, int columns, bool aligned) {
  constexpr int kChunkElems = Tile::kChunkElems;
  constexpr int kTotal = Tile::kRows * Tile::kChunks;
  static_assert(kTotal % kThreads == 0, "every thread loads the same number of chunks");
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kTotal / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / Tile::kChunks, chunk = index % Tile::kChunks;
      const bool valid = row < rows && chunk * kChunkElems < columns;
      const Element* source = valid ? g + row * row_stride + chunk * kChunkElems : g;
      ptx::cp_async_16(tile.chunk(row, chunk), source, valid ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int index = threadIdx.x; index < kTotal; index += kThreads) {
      const int row = index / Tile::kChunks, column = index % Tile::kChunks * kChunkElems;
      alignas(16) Element elements[kChunkElems];
#pragma unroll
      for (int e = 0; e < kChunkElems; ++e) {
        const bool valid = row < rows && column + e < columns;
        elements[e] = valid ? g[row * row_stride + column + e] : Element(0.0f);
      }
      *reinterpret_cast<uint4*>(tile.chunk(row, column / kChunkElems)) = *reinterpret_cast<const uint4*>(elements);
    }
  }
}

template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A warp's accumulator of 16 rows and kBlocks * 8 columns. Lane l holds, of each block, columns 2 (l % 4) + {0, 1} of rows l / 4
// (elements 0, 1) and l / 4 + 8 (elements 2, 3).
template <int kBlocks>
using RowsAccumulator = float[kBlocks][4];

// s += a b^T: a 16 rows of `a_tile` from a_row on, b all kBlocks * 8 rows of `b_tile`; both [.., kDim] with kDim summed over.
template <typename Element, int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void mma_rows_by_rows(RowsAccumulator<kBlocks>& s, ATile& a_tile, int a_row, BTile& b_tile, int lane) {
#pragma unroll
  for (int k = 0; k < ATile::kColumns; k += 16) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, a_tile.quarter_by_rows(a_row, k, lane));
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_tile.quarter_by_columns(block * 8, k, lane));
      ptx::mma_m16n8k16<Element>(s[block], a, b[0], b[1]);
      ptx::mma_m16n8k16<Element>(s[block + 1], a, b[2], b[3]);
    }
  }
}

// o += p b: p in registers, rounded to Element; b the rows of `b_tile`, of which columns [b_column, b_column + kOutBlocks * 8).
template <typename Element, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void mma_accumulator_by_columns(RowsAccumulator<kOutBlocks>& o, const RowsAccumulator<kBlocks>& p,
                                                           BTile& b_tile, int b_column, int lane) {
#pragma unroll
  for (int block = 0; block < kBlocks; block += 2) {
    const uint32_t a[4] = {pack<Element>(p[block][0], p[block][1]), pack<Element>(p[block][2], p[block][3]),
                           pack<Element>(p[block + 1][0], p[block + 1][1]), pack<Element>(p[block + 1][2], p[block + 1][3])};
#pragma unroll
    for (int out_block = 0; out_block < kOutBlocks; out_block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_tile.quarter_by_rows(block * 8, b_column + out_block * 8, lane));
      ptx::mma_m16n8k16<Element>(o[out_block], a, b[0], b[1]);
      ptx::mma_m16n8k16<Element>(o[out_block + 1], a, b[2], b[3]);
    }
  }
}

// Writes a warp's 16 accumulated rows times scale_low (rows 0-7) and scale_high (rows 8-15) to global memory, through rows
// [tile_row, tile_row + 16) and columns [column, column + kBlocks * 8) of a shared tile that only this warp uses.
template <typename Element, int kBlocks, typename Tile>
__device__ __forceinline__ void store_rows(const RowsAccumulator<kBlocks>& r, float scale_low, float scale_high, Tile& tile,
                                           int tile_row, int column, Element* g, int64_t row_stride, int rows, int columns,
                                           bool aligned, int lane) {
  constexpr int kChunkElems = Tile::kChunkElems;
  __syncwarp();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int row = tile_row + lane / 4, chunk = column / kChunkElems + block;
    reinterpret_cast<uint32_t*>(tile.chunk(row, chunk))[lane % 4] = pack<Element>(r[block][0] * scale_low, r[block][1] * scale_low);
    reinterpret_cast<uint32_t*>(tile.chunk(row + 8, chunk))[lane % 4] =
        pack<Element>(r[block][2] * scale_high, r[block][3] * scale_high);
  }
  __syncwarp();
  // Global rows: `g` is the tile's first row, `rows` and `columns` what exists of the tile.
#pragma unroll
  for (int index = lane; index < kWarpRows * kBlocks; index += 32) {
    const int row = tile_row + index / kBlocks, first = column + index % kBlocks * kChunkElems;
    if (row >= rows || first >= columns) continue;
    const Element* source = tile.chunk(row, first / kChunkElems);
    Element* target = g + row * row_stride + first;
    if (aligned) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int e = 0; e < kChunkElems && first + e < columns; ++e) target[e] = source[e];
    }
  }
}

// Zeros for rows that belong to no sequence.
template <int kThreads, typename Element>
__device__ __forceinline__ void store_zeros(Element* g, int64_t row_stride, int rows, int columns) {
  for (int index = threadIdx.x; index < rows * columns; index += kThreads) {
    g[index / columns * row_stride + index % columns] = Element(0.0f);
  }
}

// Sum or maximum over the four lanes that share an accumulator row.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

}  // namespace jagged_cuda
