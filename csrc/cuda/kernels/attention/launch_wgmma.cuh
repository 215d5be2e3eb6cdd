// What the launches of the wgmma kernels share.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/prim/hopper.h"

namespace jagged_cuda::attention {

// Boxes of a tile's rows and of the columns of its blocks, of one head. A tensor without rows is
// never copied from, but its map must be valid: it borrows q's address.
template <typename Tile>
cudaError_t encode_heads(CUtensorMap& map, const AttentionParams& params, const HeadsView& view,
                         int64_t rows, int64_t heads, int64_t dim) {
  return encode_tensor_map(map,
                           {rows > 0 ? view.data : params.q.data, params.type, rows, heads, dim,
                            view.row_stride, view.head_stride},
                           Tile::kRows, Tile::kBlockColumns);
}

// Heads that a CTA takes one after another where sequences are short, so that finding a tile and
// starting a CTA is paid for once: as many as leave enough CTAs to fill the GPU, but no more than
// two where a giant may hide among the short, whose heads are better spread over CTAs. Only max_len
// tells.
inline int heads_per_cta(const AttentionParams& params, int64_t tiles) {
  constexpr int64_t kEnoughCtas = 1024, kLongRows = 1024;
  if (has_long_sequences(params)) return 1;
  const bool no_giants = params.max_len > 0 && params.max_len <= kLongRows;
  for (int group = no_giants ? 4 : 2; group > 1; --group) {
    if (params.heads % group == 0 && tiles * (params.heads / group) >= kEnoughCtas) return group;
  }
  return 1;
}

}  // namespace jagged_cuda::attention
