// First kernel of jagged_index_select's backward pass: groups the copies by their sequences, and writes a
// FoundTile for each virtual tile of the gradient, so that a warp of the second kernel knows by one load
// which rows it writes, and of one copy where they come from.
//
// Grid: x, a CTA for each kFindWarps segments, a warp for each; y, parts of their tiles, where segments are
// few. A warp counts the numbers below that of its sequence, and finds its copies. Then the CTA's threads
// take its tiles in turn.
// Shared memory: the numbers of all copies' sequences, and the copies of these segments (16 KiB).
// Two barriers: the numbers are there, the groups are there.
#pragma once

#include "cuda/kernels/copies/copies.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/tma.cuh"

namespace jagged_cuda::copies {

constexpr int kTileBytes = 2048;  // of a tile that has been found: what its lanes have in flight
constexpr int kFindWarps = 8;     // a segment each
constexpr int kFindThreads = kFindWarps * 32;
constexpr int kFewestCtas = 128;   // that find tiles, however few segments there are
constexpr int kLoads = 4;          // numbers that a thread has in flight
constexpr int kLookedAt = 32 * 8;  // numbers of copies at a time, by a warp
constexpr int kNoNumber = 0xffff;  // of a copy that is of no sequence
static_assert(kMostCounted / kLookedAt <= 32, "a bit for each");

// What the threads of a CTA share that finds the tiles of kFindWarps segments.
struct FindTilesShared {
  alignas(16) uint16_t numbers[kMostCounted];  // of the copies' sequences
  uint16_t order[kMostCounted];                // the copies of these segments, at their places
  int64_t bounds[kFindWarps + 1];              // of the segments
  int starts[kFindWarps + 1];                  // their first tiles; the last one's end
  CopyRows firsts[kFindWarps];                 // the first copy of each, where it has any
  int groups[kFindWarps], copies[kFindWarps];
};

__device__ __forceinline__ void prefetch_offset(const OffsetsView& offsets, int64_t index) {
  ptx::prefetch_l2(static_cast<const char*>(offsets.data) + index * (offsets.wide ? 8 : 4));
}

// The copies of segment `segment`, by all lanes of a warp. A lane looks at eight numbers at a time; in
// a second pass only those are looked at again among which one has been found.
__device__ __forceinline__ void find_copies(const FindTilesParams& params, FindTilesShared& shared,
                                            int segment, int padded) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = segment - 1;
  const uint4* sEights = reinterpret_cast<const uint4*>(shared.numbers);
  // Number n of `eight`.
  const auto number_of = [](const uint4& eight, int n) {
    const uint32_t pair = n < 2 ? eight.x : n < 4 ? eight.y : n < 6 ? eight.z : eight.w;
    return static_cast<int>(pair >> n % 2 * 16 & 0xffff);
  };
  int less = 0;
  unsigned hits = 0;  // bit i: the i-th eight numbers of each lane
  for (int i = 0; i * kLookedAt < padded; ++i) {
    const uint4 eight = sEights[i * 32 + lane];
    bool is_hit = false;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      less += number_of(eight, n) < own ? 1 : 0;
      is_hit = is_hit || number_of(eight, n) == own;
    }
    hits |= is_hit ? 1u << i : 0;
  }
  less = __reduce_add_sync(kAllLanes, less);
  hits = __reduce_or_sync(kAllLanes, hits);
  int found = 0;
  if (own < 0 || own >= static_cast<int>(params.num_seqs)) hits = 0;
#pragma unroll 1
  for (; hits != 0; hits &= hits - 1) {
    const int i = __ffs(static_cast<int>(hits)) - 1;
    const uint4 eight = sEights[i * 32 + lane];
    int place = less + found;
    unsigned mine = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const bool is_own = number_of(eight, n) == own;
      const unsigned same = __ballot_sync(kAllLanes, is_own);
      place += __popc(same & ((1u << lane) - 1));
      found += __popc(same);
      mine |= is_own ? 1u << n : 0;
    }
#pragma unroll 1
    for (; mine != 0; mine &= mine - 1) {
      const int k = i * kLookedAt + lane * 8 + __ffs(static_cast<int>(mine)) - 1;
      shared.order[place++] = static_cast<uint16_t>(k);
    }
  }
  __syncwarp();  // the order is there
#pragma unroll 1
  for (int copy = lane; copy < found; copy += 32) {
    const CopyRows rows = rows_of_copy(params.taken, shared.order[less + copy]);
    if (copy == 0) shared.firsts[warp] = rows;
    if (blockIdx.y == 0) params.copies[less + copy] = rows;
  }
  if (lane == 0) {
    shared.groups[warp] = less;
    shared.copies[warp] = found;
  }
}

__device__ __forceinline__ void find_bound(const FindTilesParams& params, FindTilesShared& shared,
                                           int first_segment, int which) {
  const int segment = first_segment + which, segments = static_cast<int>(params.num_seqs) + 2;
  const int64_t bound = segment_bound(params.source, segment);
  shared.bounds[which] = bound;
  shared.starts[which] = segment < segments ? static_cast<int>(bound >> params.tile_log2) + segment
                                            : static_cast<int>(params.num_tiles);
}

// Tile `tile` of the CTA's `count` segments, of `most` rows or fewer, and where these come from.
__device__ __forceinline__ FoundTile found_tile(const FindTilesParams& params,
                                                const FindTilesShared& shared, int tile, int count,
                                                int64_t most) {
  int at = 0;  // the segment that has the tile
#pragma unroll
  for (int half = kFindWarps / 2; half > 0; half /= 2) {
    if (at + half < count && shared.starts[at + half] <= tile) at += half;
  }
  const int64_t bound = shared.bounds[at];
  const int64_t row = int64_t{tile - shared.starts[at]} << params.tile_log2;
  int64_t left = shared.bounds[at + 1] - bound - row;
  left = left < 0 ? 0 : left > most ? most : left;
  const CopyRows copy = shared.copies[at] > 0 ? shared.firsts[at] : CopyRows{0, 0};
  int64_t source_rows = copy.len - row;
  source_rows = source_rows < 0 ? 0 : source_rows > left ? left : source_rows;
  const auto number = [](int64_t value) { return static_cast<uint16_t>(value); };
  return {bound + row,
          copy.begin + row,
          row,
          number(left),
          number(source_rows),
          number(shared.groups[at]),
          number(shared.copies[at])};
}

static __global__ __launch_bounds__(kFindThreads) void find_tiles_kernel(
    const __grid_constant__ FindTilesParams params) {
  ptx::griddepcontrol_launch_dependents();
  __shared__ FindTilesShared shared;
  const int copies = static_cast<int>(params.num_copies);
  const int segments = static_cast<int>(params.num_seqs) + 2;
  const int first_segment = static_cast<int>(blockIdx.x) * kFindWarps;
  const int padded = (copies + kLookedAt - 1) / kLookedAt * kLookedAt;
  const int thread = static_cast<int>(threadIdx.x);
  // What find_copies asks for is on its way, a line for each thread.
  if (thread * 16 <= copies) prefetch_offset(params.taken, thread * 16);
#pragma unroll 1
  for (int first = thread; first < padded || first == thread; first += kLoads * kFindThreads) {
    int64_t numbers[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = first + i * kFindThreads;
      numbers[i] = -1;
      if (k < copies) numbers[i] = __ldg(params.chosen + k);
    }
    if (first <= kFindWarps) find_bound(params, shared, first_segment, first);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = first + i * kFindThreads;
      const bool is_seq = numbers[i] >= 0 && numbers[i] < params.num_seqs;
      if (k < padded) {
        shared.numbers[k] =
            static_cast<uint16_t>(is_seq ? static_cast<int>(numbers[i]) : kNoNumber);
      }
    }
  }
  __syncthreads();  // the numbers are there
  find_copies(params, shared, first_segment + static_cast<int>(threadIdx.x) / 32, padded);
  __syncthreads();  // the groups are there
  const int count = segments - first_segment < kFindWarps ? segments - first_segment : kFindWarps;
  const int end = shared.starts[count], step = static_cast<int>(gridDim.y) * kFindThreads;
  const int64_t most = int64_t{1} << params.tile_log2;
#pragma unroll 1
  for (int tile = shared.starts[0] + static_cast<int>(blockIdx.y * kFindThreads + threadIdx.x);
       tile < end; tile += step) {
    params.tiles[tile] = found_tile(params, shared, tile, count, most);
  }
}

}  // namespace jagged_cuda::copies
