// How a warp's 16 rows leave by way of shared memory: fewer instructions than epilogue.cuh has, and the
// copy runs beside what follows.
#pragma once

#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/prim/tma_store.cuh"

namespace jagged_cuda::attention {

// Rows of a warp that leave together.
constexpr int kStoredRows = 16;

// Writes a warp's rows, each times its scale, to the first columns of those of a tile from `tile_row` on.
template <typename Tile, int kBlocks>
__device__ __forceinline__ void write_rows(Tile& tile, int tile_row,
                                           const Accumulator<1, kBlocks>& o,
                                           const float (&scale)[2], int lane) {
  using Element = typename Tile::Element;
  static_assert(kBlocks * 8 <= Tile::kColumns && Tile::kRowBytes == 128);
  const uint32_t row = ptx::shared_address(tile.data) + (tile_row + lane % 16) * Tile::kRowBytes;
  const int place = lane / 16 ^ Tile::swizzle(lane % 16);
#pragma unroll
  for (int block = 0; block < kBlocks; block += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2;
      words[i] = pack<Element>(o[0][block + i / 2][2 * half] * scale[half],
                               o[0][block + i / 2][2 * half + 1] * scale[half]);
    }
    ptx::stmatrix_x4(row + block / 8 * Tile::kGroupBytes + (block % 8 ^ place) * Tile::kChunkBytes,
                     words);
  }
}

// Copies the rows that write_rows() has written, all of which exist, to those of `map` from `row` on; a
// part of lane 0's bulk group. Boxes are of kStoredRows rows.
template <typename Tile>
__device__ __forceinline__ void send_rows(const CUtensorMap& map, const Tile& tile, int tile_row,
                                          int row, int head, int lane) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane != 0) return;
#pragma unroll
  for (int column = 0; column < Tile::kColumns; column += Tile::kBlockColumns) {
    ptx::cp_async_bulk_tensor_store_3d(
        map, tile.data + column * Tile::kRows + tile_row * Tile::kBlockColumns, column, head, row);
  }
  ptx::cp_async_bulk_commit();
}

// The same of the first `rows` of them, by the warp's lanes; `g` is the first, row r lies offset_of(r)
// elements behind it.
template <typename Tile, typename OffsetOf>
__device__ __forceinline__ void copy_rows(typename Tile::Element* g, OffsetOf offset_of, Tile& tile,
                                          int tile_row, int rows, int columns, int lane) {
  __syncwarp();
  const int chunk = lane % Tile::kChunks;
  if (chunk * Tile::kChunkElems < columns) {
    for (int row = lane / Tile::kChunks; row < rows; row += 32 / Tile::kChunks) {
      *reinterpret_cast<uint4*>(g + offset_of(row) + chunk * Tile::kChunkElems) =
          *reinterpret_cast<const uint4*>(tile.chunk(tile_row + row, chunk));
    }
  }
  ptx::fence_proxy_async();  // before bulk copies write there
}

}  // namespace jagged_cuda::attention
