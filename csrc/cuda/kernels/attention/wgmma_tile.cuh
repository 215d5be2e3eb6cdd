// Tiles for wgmma, of 16-bit elements or f32: shared memory in the layout that its descriptors name,
// and the products of a warpgroup's 64 rows. Loads, stores and accumulators are those of
// mma_tile.cuh.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/prim/round_tf32.cuh"
#include "cuda/kernels/prim/wgmma.cuh"

namespace jagged_cuda {

// A [kRows, kColumns] tile in blocks of 128 bytes of columns (or its 64), one after another; within a
// block the 16-byte chunks of a row are exchanged as in SharedTile. A product may sum over its
// columns (K-major) or, of 16-bit elements, over its rows (transposed).
template <typename Element_, int kRows_, int kColumns_>
struct WarpgroupTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kMaxColumns = 128 / kElementBytes;
  static constexpr int kBlockColumns = kColumns < kMaxColumns ? kColumns : kMaxColumns;
  static constexpr int kChunkBytes = 16;
  static constexpr int kChunkElems = kChunkBytes / kElementBytes;
  static constexpr int kChunks = kColumns / kChunkElems;
  static constexpr int kRowBytes = kBlockColumns * kElementBytes;
  static constexpr int kGroupBytes = kRows * kRowBytes;  // from one block to the next
  static constexpr ptx::Swizzle kSwizzle =
      kRowBytes == 128 ? ptx::Swizzle::k128Bytes : ptx::Swizzle::k64Bytes;
  static_assert((kElementBytes == 2 || kElementBytes == 4) && kRows % 8 == 0 &&
                kColumns % kBlockColumns == 0 && (kRowBytes == 128 || kRowBytes == 64));

  alignas(1024) Element data[kRows * kColumns];

  __device__ __forceinline__ static int swizzle(int row) {
    return kRowBytes == 64 ? (row >> 1) & 3 : row & 7;
  }
  __device__ __forceinline__ Element* chunk(int row, int index) {
    return data + index / 8 * (kRows * kBlockColumns) + row * kBlockColumns +
           (index % 8 ^ swizzle(row)) * kChunkElems;
  }

  // Its rows from `row`, a multiple of 8, on.
  __device__ __forceinline__ ptx::MatrixDescriptor descriptor(int row = 0) const {
    return {ptx::shared_address(data) + row * kRowBytes, kGroupBytes, 8 * kRowBytes, kSwizzle};
  }
  // What is added to a descriptor to sum over columns, or over rows, from `k` on.
  static constexpr int column_step_bytes(int k) {
    return k / kBlockColumns * kGroupBytes + k % kBlockColumns * kElementBytes;
  }
  static constexpr int row_step_bytes(int k) { return k * kRowBytes; }
};

// Rows [first, last) of a tile become zeros, since 0 times NaN is NaN: a copy may have reached into
// the next sequence. This is one of kThreads threads; a fence and a barrier of theirs must follow
// before a product reads the tile. Whole rows of each block, so where their chunks lie does not matter.
template <int kThreads, typename Tile>
__device__ __forceinline__ void zero_tile_rows(Tile& tile, int first, int last, int thread) {
  char* bytes = reinterpret_cast<char*>(tile.data);
#pragma unroll 1
  for (int at = first * Tile::kRowBytes + thread * 16; at < last * Tile::kRowBytes;
       at += kThreads * 16) {
#pragma unroll
    for (int block = 0; block < Tile::kColumns / Tile::kBlockColumns; ++block)
      *reinterpret_cast<uint4*>(bytes + block * Tile::kGroupBytes + at) = make_uint4(0, 0, 0, 0);
  }
}

// Where the compiler does not see by itself that a tile's place is the same in all lanes of a warp, each
// product takes its descriptors from there lane by lane: MatrixDescriptor::uniform().
template <bool kUniform, typename Tile>
__device__ __forceinline__ ptx::MatrixDescriptor descriptor_of(const Tile& tile, int row = 0) {
  if constexpr (kUniform) return tile.descriptor(row).uniform();
  return tile.descriptor(row);
}

// s = a b^T over the columns of both tiles, or kDepth of them: 64 rows of a from `a_row` on, the first
// kBlocks * 8 rows of b.
template <int kDepth = 0, bool kUniform = false, int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void wgmma_rows_by_rows(Accumulator<1, kBlocks>& s, const ATile& a,
                                                   int a_row, const BTile& b) {
  using Product = ptx::Wgmma<typename ATile::Element, false>;
  const ptx::MatrixDescriptor a_rows = descriptor_of<kUniform>(a, a_row),
                              b_rows = descriptor_of<kUniform>(b);
  constexpr int kAtOnce = 32 / ATile::kElementBytes;  // columns of a product
#pragma unroll
  for (int k = 0; k < (kDepth > 0 ? kDepth : ATile::kColumns); k += kAtOnce) {
    Product::run(s[0], a_rows + ATile::column_step_bytes(k), b_rows + BTile::column_step_bytes(k),
                 k > 0);
  }
}

// An accumulator as A operand, rounded to Element.
template <typename Element, int kBlocks>
struct PackedRows {
  uint32_t fragments[kBlocks / 2][4];

  PackedRows() = default;
  __device__ __forceinline__ explicit PackedRows(const Accumulator<1, kBlocks>& p) {
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fragments[block / 2][i] =
            pack<Element>(p[0][block + i / 2][i % 2 * 2], p[0][block + i / 2][i % 2 * 2 + 1]);
      }
    }
  }

  // Two elements of one row of a block.
  __device__ __forceinline__ void set(int block, int half, const float (&pair)[2]) {
    fragments[block / 2][block % 2 * 2 + half] = pack<Element>(pair[0], pair[1]);
  }
  // The same two become 0 where they are not kept.
  __device__ __forceinline__ void keep(int block, int half, bool first, bool second) {
    fragments[block / 2][block % 2 * 2 + half] &=
        (first ? 0xffffu : 0) | (second ? 0xffff0000u : 0);
  }
};

// The same of f32, rounded to TF32; of each eight columns first those that are even, then the others: so
// a lane's own elements are its fragments.
template <int kBlocks>
struct PackedRows<float, kBlocks> {
  uint32_t fragments[kBlocks][4];

  __device__ __forceinline__ void set(int block, int half, const float (&pair)[2]) {
    fragments[block][half] = round_tf32(pair[0]);
    fragments[block][half + 2] = round_tf32(pair[1]);
  }
};

// o += p b^T over the columns of b, a tile of f32 with its columns in the order of p's.
template <int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void wgmma_packed_by_rows(Accumulator<1, kOutBlocks>& o,
                                                     const PackedRows<float, kBlocks>& p,
                                                     const BTile& b) {
  using Product = ptx::Wgmma<float, false>;
  static_assert(kOutBlocks * 8 == BTile::kRows && kBlocks * 8 == BTile::kColumns);
  const ptx::MatrixDescriptor b_rows = b.descriptor();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    Product::run(o[0], p.fragments[block], b_rows + BTile::column_step_bytes(block * 8), true);
}

// o += p b: b the first kBlocks * 8 rows of a tile, the first kOutBlocks * 8 of its columns.
template <bool kUniform = false, int kBlocks, int kOutBlocks, typename BTile>
__device__ __forceinline__ void wgmma_packed_by_columns(
    Accumulator<1, kOutBlocks>& o, const PackedRows<typename BTile::Element, kBlocks>& p,
    const BTile& b) {
  using Product = ptx::Wgmma<typename BTile::Element, true>;
  static_assert(kOutBlocks * 8 <= BTile::kColumns);
  const ptx::MatrixDescriptor b_rows = descriptor_of<kUniform>(b);
#pragma unroll
  for (int k = 0; k < kBlocks * 8; k += 16)
    Product::run(o[0], p.fragments[k / 16], b_rows + BTile::row_step_bytes(k), true);
}

// Tensor cores truncate as they add, which drifts over long sums. So a product over more than
// kSumDepth adds up its sums over that depth, rounded to nearest. The total lies in local memory,
// by an index that the compiler does not know: wide tiles leave no registers for it, and it is
// touched only once in kSumDepth.
constexpr int kSumDepth = 4096;

template <int kBlocks>
struct RoundedSum {
  float total[kBlocks * 4];
  bool exists = false;

  // Takes `sum`, which starts from zero again.
  __device__ __forceinline__ void add(float (&sum)[kBlocks][4]) {
    finish(sum);
    float* first = total + ptx::opaque(0);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      first[i] = sum[i / 4][i % 4];
      sum[i / 4][i % 4] = 0.0f;
    }
    exists = true;
  }
  // Adds to the last sum what was taken.
  __device__ __forceinline__ void finish(float (&sum)[kBlocks][4]) const {
    if (!exists) return;
    const float* first = total + ptx::opaque(0);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) sum[i / 4][i % 4] += first[i];
  }
};

}  // namespace jagged_cuda
