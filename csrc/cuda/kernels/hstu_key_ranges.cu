// hstu_key_ranges: what each row sees, by the rule in contract/hstu_rule.h.
//
// A CTA takes one virtual tile of kTileRows rows, a thread one row, which it writes as 16 bytes. Rows
// outside every sequence get empty ranges. No shared memory, no barrier.
#include "cuda/kernels/hstu_key_ranges.h"

#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda {
namespace {

constexpr int kTileRows = 128;

static_assert(sizeof(KeyIntervals) == sizeof(int4));

__global__ void write_key_ranges(const __grid_constant__ HstuKeyRangesParams params) {
  const JaggedTile tile = find_tile<kTileRows>(params.q_offsets, blockIdx.x);
  const int64_t row = tile.row + threadIdx.x;
  if (row >= tile.rows.len) return;
  KeyIntervals seen;
  if (tile.seq >= 0) {
    const int64_t len = sequence_rows(params.kv_offsets, tile.seq).len;
    seen = params.rule.at(row + len - tile.rows.len, len, count_of(params.targets, tile.seq),
                          count_of(params.contextual, tile.seq));
  }
  reinterpret_cast<int4*>(params.out)[tile.rows.begin + row] =
      make_int4(seen.first.begin, seen.first.end, seen.second.begin, seen.second.end);
}

}  // namespace

cudaError_t launch_hstu_key_ranges(const HstuKeyRangesParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.q_offsets.total, params.q_offsets.num_seqs, kTileRows);
  return launch<write_key_ranges>(params, {tiles}, kTileRows, 0, stream, nullptr);
}

}  // namespace jagged_cuda
