// What the kernels of jagged_target_attention share: which keys and rows a CTA has, moving the rows
// of dense queries, and their grids.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/jagged_target_attention.h"
#include "cuda/kernels/prim/narrow_search.cuh"

namespace jagged_cuda::attention {

// `keys` keys from global row `first_key` on, a chunk of sequence `seq`.
struct TargetChunk {
  int64_t seq;  // -1 outside all sequences
  int64_t first_key;
  int keys;
  bool exists;   // the first chunk of an empty sequence exists too: somebody must write its results
  bool whole;    // all of the sequence: results go out at once
  int64_t slot;  // of this part in the workspace
};

// The first slot that a sequence owns.
__device__ __forceinline__ int64_t first_slot(const TargetAttentionParams& params, int64_t seq,
                                              int64_t begin) {
  return params.slots_as_tiles ? (begin >> params.slot_log2) + seq + 1
                               : (2 * begin) >> params.slot_log2;
}

// The chunk with this index: chunks are tiles (prim/jagged.cuh). All lanes of a warp call it together.
__device__ __forceinline__ TargetChunk find_chunk(const TargetAttentionParams& params,
                                                  int64_t index) {
  const JaggedTile tile = find_any_tile(params.offsets, index, params.chunk_log2);
  const int64_t left = tile.rows.len - tile.row, most = int64_t{1} << params.chunk_log2;
  TargetChunk chunk;
  chunk.seq = tile.seq;
  chunk.first_key = tile.rows.begin + tile.row;
  chunk.keys = static_cast<int>(left < 0 ? 0 : (left < most ? left : most));
  chunk.exists = chunk.keys > 0 || (tile.seq >= 0 && tile.row == 0);
  chunk.whole = tile.rows.len <= most;
  chunk.slot = first_slot(params, tile.seq, tile.rows.begin) + (tile.row >> params.chunk_log2);
  return chunk;
}

// Which query and head a row of a key/value head is, and where it lies in contiguous [B, N, H]
// tensors.
struct TargetRows {
  int64_t seq;
  int num_queries;
  int out_queries;
  int heads;
  int group;
  int first_head;

  __device__ __forceinline__ TargetRows(const TargetAttentionParams& params, int64_t seq,
                                        int kv_head)
      : seq(seq),
        num_queries(params.num_queries),
        out_queries(params.out_queries),
        heads(params.heads),
        group(params.heads / params.kv_heads),
        first_head(kv_head * (params.heads / params.kv_heads)) {}

  __device__ __forceinline__ int count() const { return num_queries * group; }
  __device__ __forceinline__ int64_t offset(const QueriesView& view, int row) const {
    return seq * view.seq_stride + row / group * view.row_stride +
           (first_head + row % group) * view.head_stride;
  }
  __device__ __forceinline__ int64_t index(int row) const {
    return (seq * out_queries + row / group) * heads + first_head + row % group;
  }
};

// Rows [first_row, first_row + rows) of queries into the rows of a tile; the rest becomes zeros. By
// kThreads threads from a multiple of kThreads on; as load_tile: the caller commits and waits.
template <int kThreads, typename Tile>
__device__ __forceinline__ void load_query_rows(Tile& tile, const QueriesView& view,
                                                const TargetRows& target, int first_row, int rows,
                                                int columns, bool aligned) {
  using Element = typename Tile::Element;
  constexpr int kChunkElems = Tile::kChunkElems;
  const Element* g = static_cast<const Element*>(view.data);
#pragma unroll 1
  for (int index = threadIdx.x % kThreads; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int row = index / Tile::kChunks, column = index % Tile::kChunks * kChunkElems;
    Element* chunk = tile.chunk(row, index % Tile::kChunks);
    const bool exists = row < rows && column < columns;
    const Element* source = exists ? g + target.offset(view, first_row + row) + column : g;
    if (aligned) {
      ptx::cp_async_16(chunk, source, exists ? 16 : 0);
    } else {
      alignas(16) Element elements[kChunkElems];
#pragma unroll
      for (int e = 0; e < kChunkElems; ++e) {
        elements[e] = exists && column + e < columns ? source[e] : Element(0.0f);
      }
      *reinterpret_cast<uint4*>(chunk) = *reinterpret_cast<const uint4*>(elements);
    }
  }
}

// Two neighbouring elements of a row, of which those below `columns` exist. `paired`: their address
// is a multiple of 4 bytes.
template <typename Element>
__device__ __forceinline__ void store_pair(Element* g, float low, float high, int column,
                                           int columns, bool paired) {
  if (paired && column + 1 < columns) {
    *reinterpret_cast<uint32_t*>(g) = pack<Element>(low, high);
    return;
  }
  if (column < columns) g[0] = Element(low);
  if (column + 1 < columns) g[1] = Element(high);
}

__host__ __device__ __forceinline__ int round_up_to_8(int columns) { return (columns + 7) / 8 * 8; }

// The rows of a key/value head within the workspace's slot.
__device__ __forceinline__ int64_t part_row(const TargetAttentionParams& params, int64_t slot,
                                            int kv_head, int row) {
  const int64_t rows = int64_t{params.num_queries} * (params.heads / params.kv_heads);
  return (slot * params.kv_heads + kv_head) * rows + row;
}

inline int64_t target_rows(const TargetAttentionParams& params) {
  return int64_t{params.num_queries} * (params.heads / params.kv_heads);
}

// Calls launch(Constant<bucket of head dims>, Constant<rows of a tile>) for the fewest rows on mma.sync
// that hold a sequence's; of more than 128 there are several tiles.
template <typename Params, typename Launch>
cudaError_t for_dim_and_rows(const Params& params, Launch launch) {
  return for_dim(params, [&](auto dim) {
    const int64_t rows = target_rows(params);
    if (rows <= 16) return launch(dim, Constant<16>{});
    return rows <= 32 ? launch(dim, Constant<32>{}) : launch(dim, Constant<128>{});
  });
}

// Chunks, times key/value heads, times row tiles of each.
inline Grid target_grid(const TargetAttentionParams& params, int64_t row_tiles) {
  const int64_t chunks =
      num_tiles(params.offsets.total, params.offsets.num_seqs, 1 << params.chunk_log2);
  const int64_t tiles = row_tiles * params.kv_heads;
  return {tiles > Grid::kMaxX / chunks ? Grid::kMaxX + 1 : chunks * tiles};
}

}  // namespace jagged_cuda::attention
