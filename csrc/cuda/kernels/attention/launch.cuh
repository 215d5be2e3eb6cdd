// Launching the attention kernels for a head dim known at run time.
#pragma once

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda::attention {

// Calls launch with Constant<16-row blocks of a warp>, Constant<whether it is_general()>, for which
// smaller tiles leave out more steps, and Constant<whether silu takes softmax's place>.
template <typename Launch>
cudaError_t for_mma_sync(const AttentionParams& params, Launch launch) {
  const Constant<0> no;
  const Constant<1> yes;
  if (params.silu) return launch(Constant<1>{}, yes, yes);
  if (is_general(params)) return launch(Constant<1>{}, yes, no);
  return has_long_sequences(params) ? launch(Constant<2>{}, no, no) : launch(Constant<1>{}, no, no);
}

inline Grid tile_grid(const AttentionParams& params, const OffsetsView& offsets, int tile_rows,
                      int heads) {
  return {params.longer_in_slabs ? num_longer_tiles(offsets.total, tiny_limit(params))
                                 : num_tiles(offsets.total, offsets.num_seqs, tile_rows),
          heads};
}

// A grid for TilesOfCta: enough CTAs for a giant's tiles, and no more where there is little to search.
inline Grid looped_grid(const AttentionParams& params, const OffsetsView& offsets, int tile_rows,
                        int heads) {
  constexpr int64_t kManyCtas = 528,
                    kFewCtas = 264;  // what an H100 holds of the smallest, and half
  constexpr int64_t kFewSlabs = 8 * kFewCtas;
  Grid grid = tile_grid(params, offsets, tile_rows, heads);
  // Where longer sequences are less rare, each of a giant's tiles gets a CTA of its own.
  const bool are_rare =
      params.short_apart || offsets.total < offsets.num_seqs * (tiny_limit(params) / 2);
  const int64_t ctas = grid.x / 2 <= kFewSlabs ? kFewCtas : kManyCtas,
                enough = are_rare ? (ctas + heads - 1) / heads : kManyCtas;
  if (params.longer_in_slabs && grid.x > enough) grid.x = enough;
  return grid;
}

// Whether most rows are likely those of long sequences, which have a kernel of their own: then those
// of 64-row tiles are looked for by sequence, in few CTAs. (Where they are a quarter, as in U[1, 2048],
// the loop costs more than the CTAs that find nothing.)
inline bool most_are_long(const AttentionBackwardParams& params) {
  return params.long_plan != nullptr && !params.longer_in_slabs && params.q_offsets.num_seqs > 0 &&
         params.q_offsets.data == params.kv_offsets.data &&
         params.q_offsets.total / ((kLongBackwardRows + 1) * 3 / 2) >= params.q_offsets.num_seqs;
}

// Launches a kernel that, where it is behind another one of the same operator with which it shares
// nothing, may start while that one still runs.
template <auto kKernel, typename Params>
cudaError_t launch_behind(bool is_behind, const Params& params, const Grid& grid, int threads,
                          int shared_bytes, cudaStream_t stream, const char* path) {
  return is_behind ? launch_dependent<kKernel>(params, grid, threads, shared_bytes, stream, path)
                   : launch<kKernel>(params, grid, threads, shared_bytes, stream, path);
}

// Whether the kernel for long sequences, or what writes its plan, comes before those for others.
inline bool is_behind_long(const AttentionParams& params) {
  return params.long_plan != nullptr && (!params.plans_itself || params.long_first);
}

// The path of a kernel that may run behind that for long sequences, which is then the call's.
inline const char* path_behind_long(const AttentionParams& params, const char* path) {
  return params.long_first ? nullptr : path;
}

// Launches the first kernel for longer sequences, maybe behind that for tiny ones.
template <auto kKernel, typename Params>
cudaError_t launch_longer(const AttentionParams& attention, const Params& params, const Grid& grid,
                          int threads, int shared_bytes, cudaStream_t stream, const char* path) {
  return launch_behind<kKernel>(attention.split_by_length, params, grid, threads, shared_bytes,
                                stream, path);
}

// Boxes of a tile's rows and of the columns of its blocks, or of fewer rows of 2^packed_shift heads. A
// tensor without rows is never copied from, but its map must be valid: it borrows q's address.
template <typename Tile>
cudaError_t encode_heads(CUtensorMap& map, const AttentionParams& params, const HeadsView& view,
                         int64_t rows, int64_t heads, int64_t dim, int packed_shift = 0) {
  return encode_tensor_map(map,
                           {rows > 0 ? view.data : params.q.data, params.type, rows, heads, dim,
                            view.row_stride, view.head_stride},
                           Tile::kRows >> packed_shift, Tile::kBlockColumns, 1 << packed_shift);
}

// Heads that a CTA takes one after another where sequences are short, so that finding a tile and
// starting a CTA is paid for once: as many as leave enough CTAs to fill the GPU, but no more than
// two where a giant may hide among the short, whose heads are better spread over CTAs. Only max_len
// tells.
inline int heads_per_cta(const AttentionParams& params, int64_t tiles) {
  constexpr int64_t kEnoughCtas = 1024, kGiantRows = 1024;
  const bool no_long = params.long_plan != nullptr;  // they have a kernel of their own
  if (has_long_sequences(params) && !no_long) return 1;
  const bool no_giants = no_long || (params.max_len > 0 && params.max_len <= kGiantRows);
  for (int group = no_giants ? 4 : 2; group > 1; --group) {
    if (params.heads % group == 0 && tiles * (params.heads / group) >= kEnoughCtas) return group;
  }
  return 1;
}

}  // namespace jagged_cuda::attention
