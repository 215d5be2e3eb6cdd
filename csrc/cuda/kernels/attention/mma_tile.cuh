// Tiles of 16-bit elements for mma.sync: shared memory with a swizzle, loads that zero what lies
// outside, fragments, and the products of one warp's rows.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>

namespace jagged_cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A [kRows, kColumns] tile in 16-byte chunks of 8 elements. Chunks are exchanged within groups of 8
// (of 4 in rows of 64 bytes) so that the 8 rows that ldmatrix reads at once lie in 8 different
// groups of 4 banks.
template <typename Element_, int kRows_, int kColumns_>
struct SharedTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunkElems = 8;
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunks = kColumns / kChunkElems;
  static constexpr int kRowBytes = kColumns * 2;
  static_assert(sizeof(Element) == 2 && (kChunks == 4 || kChunks % 8 == 0),
                "the swizzle is written for these rows");

  alignas(128) Element data[kRows * kColumns];

  // What the chunks of a row are exclusive-ored with; the same for rows that differ by a multiple
  // of 8.
  __device__ __forceinline__ static int swizzle(int row) {
    return kChunks == 4 ? (row >> 1) & 3 : row & 7;
  }

  __device__ __forceinline__ Element* chunk(int row, int index) {
    return data + row * kColumns + (index ^ swizzle(row)) * kChunkElems;
  }
};

// The shared-memory addresses that a lane gives to ldmatrix for the 16x16 blocks of a tile:
// computed once, since stepping to another block changes them by an exclusive or and a constant.
template <typename Tile>
struct LaneAddress {
  uint32_t base;

  // 8x8 quarters in the order (0, 0), (1, 0), (0, 1), (1, 1): an A operand, or, transposed, two B
  // operands of P V. `row` is a multiple of 8.
  __device__ __forceinline__ static LaneAddress by_rows(Tile& tile, int row, int lane) {
    return LaneAddress(tile, row, lane % 16, lane / 16);
  }
  // In the order (0, 0), (0, 1), (1, 0), (1, 1): two B operands of Q K^T.
  __device__ __forceinline__ static LaneAddress by_columns(Tile& tile, int row, int lane) {
    return LaneAddress(tile, row, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // The block `rows` and `columns` further, both multiples of 16 (8 rows for by_rows) known at
  // compile time.
  __device__ __forceinline__ uint32_t block(int rows, int columns) const {
    const int chunk = columns / Tile::kChunkElems;
    return (base ^ (chunk % 8 * Tile::kChunkBytes)) + rows * Tile::kRowBytes +
           chunk / 8 * 8 * Tile::kChunkBytes;
  }
  // The same `rows` rows further, a multiple of 8.
  __device__ __forceinline__ LaneAddress rows_on(int rows) const {
    LaneAddress further = *this;
    further.base += rows * Tile::kRowBytes;
    return further;
  }

 private:
  __device__ __forceinline__ LaneAddress(Tile& tile, int row, int lane_row, int lane_chunk)
      : base(ptx::shared_address(tile.data) + (row + lane_row) * Tile::kRowBytes +
             (lane_chunk ^ Tile::swizzle(lane_row)) * Tile::kChunkBytes) {}
};

// Rows [0, rows) and columns [0, columns) of a row-major operand in global memory; the rest of the
// tile becomes zeros, so that nothing of a neighbouring sequence, not even NaN, reaches a product.
// `aligned` rows go through cp.async (the caller commits and waits), with a policy of L2 if there is one,
// others element by element.
template <int kThreads, typename Tile, typename... Policy>
__device__ __forceinline__ void load_tile(Tile& tile, const typename Tile::Element* g,
                                          int64_t row_stride, int rows, int columns, bool aligned,
                                          Policy... policy) {
  using Element = typename Tile::Element;
  constexpr int kChunkElems = Tile::kChunkElems, kChunks = Tile::kChunks;
  constexpr int kRowStep =
      kThreads / kChunks;  // a thread copies one chunk of every kRowStep-th row
  static_assert(kThreads % kChunks == 0 && Tile::kRows % kRowStep == 0 && kRowStep % 4 == 0);
  const int first_row = static_cast<int>(threadIdx.x) / kChunks,
            chunk = static_cast<int>(threadIdx.x) % kChunks;
  if (aligned) {
    const int rows_left = chunk * kChunkElems < columns ? rows - first_row : 0;
    const Element* source = g + first_row * row_stride + chunk * kChunkElems;
    const int64_t step = kRowStep * row_stride;
    const uint32_t target = ptx::shared_address(tile.chunk(first_row, chunk));
#pragma unroll
    for (int i = 0; i < Tile::kRows / kRowStep; ++i) {
      // Steps of 4 rows change the swizzle's third bit every other time; first_row is below 4 then.
      const uint32_t flip = kRowStep % 8 == 0 ? 0 : i % 2 * (4 * Tile::kChunkBytes);
      ptx::cp_async_16((target ^ flip) + i * kRowStep * Tile::kRowBytes, source,
                       i * kRowStep < rows_left ? 16 : 0, policy...);
      source += step;
    }
  } else {
#pragma unroll 1
    for (int row = first_row; row < Tile::kRows; row += kRowStep) {
      alignas(16) Element elements[kChunkElems];
#pragma unroll
      for (int e = 0; e < kChunkElems; ++e) {
        const int column = chunk * kChunkElems + e;
        elements[e] = row < rows && column < columns ? g[row * row_stride + column] : Element(0.0f);
      }
      *reinterpret_cast<uint4*>(tile.chunk(row, chunk)) = *reinterpret_cast<const uint4*>(elements);
    }
  }
}

// A warp's accumulator of kRowBlocks * 16 rows and kBlocks * 8 columns. Lane l holds, of each
// block, columns 2 (l % 4) + {0, 1} of rows l / 4 (elements 0, 1) and l / 4 + 8 (elements 2, 3).
template <int kRowBlocks, int kBlocks>
using Accumulator = float[kRowBlocks][kBlocks][4];

// The kRowBlocks * 16 rows of a tile that a warp owns, as A operands over all of the tile's
// columns: read from shared memory at each use, or once and kept in kColumns / 4 * kRowBlocks
// registers.
template <bool kInRegisters, int kRowBlocks, typename Tile>
struct RowOperand {
  LaneAddress<Tile> rows;

  __device__ __forceinline__ RowOperand(Tile& tile, int row, int lane)
      : rows(LaneAddress<Tile>::by_rows(tile, row, lane)) {}
  __device__ __forceinline__ void read(uint32_t (&a)[4], int r, int k) const {
    ptx::ldmatrix_x4(a, rows.block(r * 16, k));
  }
};

template <int kRowBlocks, typename Tile>
struct RowOperand<true, kRowBlocks, Tile> {
  uint32_t fragments[Tile::kColumns / 16][kRowBlocks][4];

  __device__ __forceinline__ RowOperand(Tile& tile, int row, int lane) {
    const auto rows = LaneAddress<Tile>::by_rows(tile, row, lane);
#pragma unroll
    for (int k = 0; k < Tile::kColumns; k += 16) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
        ptx::ldmatrix_x4(fragments[k / 16][r], rows.block(r * 16, k));
    }
  }
  __device__ __forceinline__ void read(uint32_t (&a)[4], int r, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragments[k / 16][r][i];
  }
};

// s += a b^T: a the rows of a warp, b the first kBlocks * 8 rows of another tile from
// LaneAddress::by_columns on; the columns are summed over.
template <int kRowBlocks, int kBlocks, bool kInRegisters, typename ATile, typename BTile>
__device__ __forceinline__ void mma_rows_by_rows(
    Accumulator<kRowBlocks, kBlocks>& s, const RowOperand<kInRegisters, kRowBlocks, ATile>& a_rows,
    LaneAddress<BTile> b_rows) {
  using Element = typename ATile::Element;
#pragma unroll
  for (int k = 0; k < ATile::kColumns; k += 16) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) a_rows.read(a[r], r, k);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_rows.block(block * 8, k));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        ptx::mma_m16n8k16<Element>(s[r][block], a[r], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(s[r][block + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// o += p b: p in registers, rounded to Element; b kBlocks * 8 rows and kOutBlocks * 8 columns from
// LaneAddress::by_rows on.
template <int kRowBlocks, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void mma_accumulator_by_columns(
    Accumulator<kRowBlocks, kOutBlocks>& o, const Accumulator<kRowBlocks, kBlocks>& p,
    LaneAddress<BTile> b_rows, int b_column = 0) {
  using Element = typename BTile::Element;
#pragma unroll
  for (int block = 0; block < kBlocks; block += 2) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[r][i] = pack<Element>(p[r][block + i / 2][i % 2 * 2], p[r][block + i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int out_block = 0; out_block < kOutBlocks; out_block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(
          b, b_rows.block(block * 8, out_block * 8) + b_column * static_cast<int>(sizeof(Element)));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        ptx::mma_m16n8k16<Element>(o[r][out_block], a[r], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(o[r][out_block + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// Writes a warp's rows, each times its scale[row block][half], to global memory, through rows
// [tile_row, ...) and columns [column, column + kBlocks * 8) of a shared tile, which only this warp
// uses by now. `g` is the first row of the tile, `rows` and `columns` what exists of it.
template <typename Element, int kRowBlocks, int kBlocks, typename Tile>
__device__ __forceinline__ void store_rows(const Accumulator<kRowBlocks, kBlocks>& o,
                                           const float (&scale)[kRowBlocks][2], Tile& tile,
                                           int tile_row, int column, Element* g, int64_t row_stride,
                                           int rows, int columns, bool aligned, int lane) {
  constexpr int kChunkElems = Tile::kChunkElems;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        auto* chunk = reinterpret_cast<uint32_t*>(
            tile.chunk(tile_row + r * 16 + half * 8 + lane / 4, column / kChunkElems + block));
        chunk[lane % 4] = pack<Element>(o[r][block][2 * half] * scale[r][half],
                                        o[r][block][2 * half + 1] * scale[r][half]);
      }
    }
  }
  __syncwarp();
  constexpr int kChunks = kRowBlocks * 16 * kBlocks;
  if (aligned) {
#pragma unroll
    for (int index = lane; index < kChunks; index += 32) {
      const int row = tile_row + index / kBlocks, first = column + index % kBlocks * kChunkElems;
      if (row >= rows || first >= columns) continue;
      *reinterpret_cast<uint4*>(g + row * row_stride + first) =
          *reinterpret_cast<const uint4*>(tile.chunk(row, first / kChunkElems));
    }
  } else {  // rare, and in the code of every kernel: it stays a loop
#pragma unroll 1
    for (int index = lane; index < kChunks; index += 32) {
      const int row = tile_row + index / kBlocks, first = column + index % kBlocks * kChunkElems;
      if (row >= rows || first >= columns) continue;
      const Element* source = tile.chunk(row, first / kChunkElems);
      Element* target = g + row * row_stride + first;
      for (int e = 0; e < kChunkElems && first + e < columns; ++e) target[e] = source[e];
    }
  }
}

// Zeros for rows that belong to no sequence. kOneIndex: the same stores, but a thread's row and column
// come from one index of the loop. Which of the two leaves more registers to the code behind it
// depends on the kernel.
template <int kThreads, bool kOneIndex = false, typename Element>
__device__ __forceinline__ void store_zeros(Element* g, int64_t row_stride, int rows, int columns) {
  const auto store_row = [&](int row, int first) {
#pragma unroll 1
    for (int column = first; column < columns; column += 32)
      g[row * row_stride + column] = Element(0.0f);
  };
  if constexpr (kOneIndex) {
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * 32; index += kThreads)
      store_row(index / 32, index % 32);
  } else {
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32)
      store_row(row, threadIdx.x % 32);
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
