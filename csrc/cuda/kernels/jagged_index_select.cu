// jagged_index_select: whole sequences by their numbers. Its plan alone is rows/ranges.cuh's.
//
//   z_k[i] = x_b[i] with b = chosen[k]
//
// and its gradient: dx_b[i] = sum over the copies k of sequence b, in the order of k, of dz_k[i].
//
// Both are two kernels, of which the second goes through the rows of x: a row is read once for all of
// its copies, wherever these are in the result. It starts while the first one runs, and waits for it.
// Nothing is sorted or added atomically.
//
// Forward, the first kernel writes the rows of the copies of the first sequence, then those of the next,
// and groups[b] = where those of b begin. Both are counts over all keys, number * kMostCounted + k,
//     place of k = # { keys below that of k },   groups[b] = # { keys below that of b without copy }.
// A copy before which none has its number is its sequence's first, and says where it is: the second
// kernel then need not ask for more where a sequence has no other. The offsets of the copies are made
// here too: each CTA adds the lengths of all copies before its own. Grid: x, a CTA for each 32 of these
// M + B + 1 counts, a lane for each; each of its warps counts over a part of the keys, four at a time
// from shared memory, where all are. Shared memory: keys (16 KiB) and the counts and lengths of all
// warps (8 KiB), each published by a barrier. The second kernel has a warp for each virtual tile of
// kCopyRows rows of x, or twice as many narrow ones (prim/jagged.cuh), which it finds while it waits.
// Each lane looks up one copy of the tile's sequence, 32 at a time, and rows are written to one copy
// after another; rows behind the last copy become zeros.
//
// Backward, the first kernel also writes a FoundTile for each virtual tile, so that a warp of the second
// knows by one load which rows it writes, and of one copy where they come from. Grid: x, a CTA for each
// kFindWarps segments, a warp for each; y, parts of their tiles, where segments are few. A warp counts
// the numbers below that of its sequence, and finds its copies, in shared memory (16 KiB), where those
// of all copies are. Two barriers: the numbers are there, the groups are there. Then the CTA's threads take
// its tiles in turn. Where a sort has grouped the copies already, it is only followed, and a warp of the
// second kernel finds its tile. A row with one copy is copied, of more they are added in pairs, one copy
// after another: sums run in f32 (f64 of f64), in an order that depends on nothing else. A sequence
// without copies, and rows outside every sequence, give zeros.
//
// In both second kernels lanes are beside each other along a row, in units of up to 16 bytes (of the
// gradient in vectors of 16 bytes, or elements where alignment forbids them); what they leave over of
// the warp takes the next rows. No shared memory, no barriers.
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/rows/ranges.cuh"
#include "cuda/kernels/rows/unit.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

constexpr int kGroupWarps = 32;
constexpr int kNoKey = 0x7fffffff;  // behind every copy's
constexpr int kFollowThreads = 256;
constexpr int kCopyRows = 16;           // of a tile: those with many copies take long
constexpr int kPairItems = kItems / 2;  // rows of two copies that a lane has in flight
constexpr int kTileBytes = 2048;   // of a tile that has been found: what its lanes have in flight
constexpr int kSumCtas = 8;        // per SM, that the registers must leave room for
constexpr int kWriteCtas = 8;      // likewise
constexpr int kNarrowBytes = 128;  // rows of so many: tiles twice as high, when they are read

// The rows of copy `copy`; none if there is no such copy.
__device__ __forceinline__ CopyRows rows_of_copy(const OffsetsView& taken, int64_t copy) {
  if (copy < 0 || copy >= taken.num_seqs) return {0, 0};
  const RowRange rows = sequence_rows(taken, copy);
  return {rows.begin, rows.len};
}

__device__ __forceinline__ void prefetch_offset(const OffsetsView& offsets, int64_t index) {
  ptx::prefetch_l2(static_cast<const char*>(offsets.data) + index * (offsets.wide ? 8 : 4));
}

// How many rows copy `copy` has if all of them are taken; none if there is no such copy.
__device__ __forceinline__ int64_t planned_len(const GroupCopiesParams& params, int64_t copy) {
  if (copy >= params.num_copies) return 0;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return 0;
  return sequence_rows(params.source, number).len;
}

// Writes where copy `copy` begins, and says which rows are left of it.
__device__ __forceinline__ CopyRows plan_copy(const GroupCopiesParams& params, int64_t copy,
                                              int64_t begin, int64_t len) {
  const auto cut = [&](int64_t place) { return place < params.capacity ? place : params.capacity; };
  if (params.source.wide) {
    static_cast<int64_t*>(params.planned)[copy] = cut(begin);
  } else {
    static_cast<int*>(params.planned)[copy] = static_cast<int>(cut(begin));
  }
  if (params.uncut != nullptr) params.uncut[copy] = begin;
  return {cut(begin), cut(begin + len) - cut(begin)};
}

// The sum of `own` over the lanes up to this one.
__device__ __forceinline__ int64_t sum_up_to_lane(int64_t own) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, own, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) own += other;
  }
  return own;
}

__global__ __launch_bounds__(kGroupWarps * 32) void group_copies_kernel(
    const __grid_constant__ GroupCopiesParams params) {
  ptx::griddepcontrol_launch_dependents();  // the second kernel finds its tiles meanwhile
  __shared__ alignas(16) int sKeys[kMostCounted];
  __shared__ int sBefore[kGroupWarps][32], sLess[kGroupWarps][32];
  __shared__ int64_t sRows[kGroupWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int copies = static_cast<int>(params.num_copies);
  const int seqs = static_cast<int>(params.num_seqs);
  const int first = static_cast<int>(blockIdx.x) * 32, item = first + lane;
  const bool is_copy = item < copies;
  const int64_t own_len = warp == 0 ? planned_len(params, item) : 0;
  // Shares are whole vectors.
  const int share = (copies + 4 * kGroupWarps - 1) / (4 * kGroupWarps) * 4;
  int64_t rows = 0;  // of the copies before this CTA's
#pragma unroll 4
  for (int k = threadIdx.x; k < share * kGroupWarps; k += kGroupWarps * 32) {
    const int64_t number = k < copies ? __ldg(params.chosen + k) : 0;
    // Numbers that are none of a sequence come first or last.
    const int cut = number < 0 ? -1 : number < seqs ? static_cast<int>(number) : seqs;
    sKeys[k] = k < copies ? cut * static_cast<int>(kMostCounted) + k : kNoKey;
    if (k < first) rows += planned_len(params, k);
  }
  rows = sum_up_to_lane(rows);
  if (lane == 31) sRows[warp] = rows;
  __syncthreads();  // all keys are there, and the rows of each warp
  const int own_key = is_copy ? sKeys[item] : (item - copies) * static_cast<int>(kMostCounted);
  // Of a sequence: no copy comes before the first that could have its number.
  const int first_key = own_key - (is_copy ? item : 0);
  int before = 0, less = 0;
#pragma unroll 4
  for (int k = warp * share; k < (warp + 1) * share; k += 4) {
    const int4 keys = *reinterpret_cast<const int4*>(&sKeys[k]);
    before += (keys.x < own_key ? 1 : 0) + (keys.y < own_key ? 1 : 0) + (keys.z < own_key ? 1 : 0) +
              (keys.w < own_key ? 1 : 0);
    less += (keys.x < first_key ? 1 : 0) + (keys.y < first_key ? 1 : 0) +
            (keys.z < first_key ? 1 : 0) + (keys.w < first_key ? 1 : 0);
  }
  sBefore[warp][lane] = before;
  sLess[warp][lane] = less;
  __syncthreads();  // the counts of all warps are there
  if (warp != 0) return;
  int sum = 0, sum_less = 0;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    sum += sBefore[w][lane];
    sum_less += sLess[w][lane];
  }
  int64_t end = sum_up_to_lane(own_len);
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) end += sRows[w];
  CopyRows own{0, 0};
  if (item <= copies) own = plan_copy(params, item, end - own_len, own_len);
  if (is_copy) {
    params.copies[sum] = own;
    const int number = (own_key - item) / static_cast<int>(kMostCounted);
    if (sum == sum_less && number >= 0 && number < seqs) params.firsts[number] = own;
  } else if (item - copies <= seqs) {
    params.groups[item - copies] = sum;
  }
}

__global__ __launch_bounds__(kFollowThreads) void follow_order_kernel(
    const __grid_constant__ FollowOrderParams params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t place = blockIdx.x * int64_t{kFollowThreads} + threadIdx.x;
  if (place >= params.num_copies) return;
  const int64_t copy = __ldg(params.order + place);
  const CopyRows own = rows_of_copy(params.taken, copy);
  params.copies[place] = own;
  if (copy < 0 || copy >= params.num_copies) return;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return;
  if (__ldg(params.groups + number) == place) params.firsts[number] = own;
}

constexpr int kFindWarps = 8;  // a segment each
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

__global__ __launch_bounds__(kFindThreads) void find_tiles_kernel(
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
    params.tiles[tile] = {bound + row,
                          copy.begin + row,
                          row,
                          number(left),
                          number(source_rows),
                          number(shared.groups[at]),
                          number(shared.copies[at])};
  }
}

struct SumCopiesLaunch {
  SumCopiesParams params;
  int lanes_log2;
  int64_t tiles;
};

// The rows of the copy with place `place` in order; none at or past `end`.
__device__ __forceinline__ CopyRows load_copy(const CopyRows* copies, int64_t place, int64_t end) {
  if (place >= end) return {0, 0};
  const longlong2 copy = __ldg(reinterpret_cast<const longlong2*>(copies + place));
  return {copy.x, copy.y};
}

// A tile of rows of the result, and where they come from.
struct SumTile {
  int64_t begin;              // its first row in the whole tensor
  int64_t source;             // where its first copy has that row
  int64_t row;                // in its sequence
  int64_t group, group_end;   // its copies, in their order
  int64_t rows, source_rows;  // of the tile; those that its first copy has
};

// The tile as the first kernel has found it. With wrong offsets two may have written it at once.
__device__ __forceinline__ SumTile load_tile(const SumCopiesParams& params, int64_t index) {
  FoundTile found;
  const uint4* gFound = reinterpret_cast<const uint4*>(params.tiles + index);
  reinterpret_cast<uint4*>(&found)[0] = __ldg(gFound);
  reinterpret_cast<uint4*>(&found)[1] = __ldg(gFound + 1);
  const auto at_most = [](int64_t value, int64_t most) { return value < most ? value : most; };
  SumTile tile{found.begin, found.source, found.row, found.group, 0, 0, 0};
  tile.group_end = at_most(tile.group + found.copies, params.num_copies);
  if (found.begin >= 0 && found.row >= 0) {
    tile.rows = at_most(params.offsets.total - found.begin, found.rows);
  }
  if (found.source >= 0) {
    tile.source_rows = at_most(params.num_rows - found.source, found.source_rows);
  }
  return tile;
}

// The tile that a warp has found itself, by the groups of a sort.
__device__ __forceinline__ SumTile tile_of_groups(const SumCopiesParams& params,
                                                  const JaggedTile& found) {
  const int64_t left = found.rows.len - found.row;
  SumTile tile{found.rows.begin + found.row, 0, found.row, 0, 0, 0, 0};
  tile.rows = left < kCopyRows ? left : kCopyRows;
  if (found.seq < 0 || left <= 0) return tile;
  const int64_t group = __ldg(params.groups + found.seq);
  const int64_t group_end = __ldg(params.groups + found.seq + 1);
  const longlong2 first = __ldg(reinterpret_cast<const longlong2*>(params.firsts + found.seq));
  tile.group = group < 0 ? 0 : group;
  tile.group_end = group_end > params.num_copies ? params.num_copies : group_end;
  if (tile.group_end > tile.group) {
    tile.source = first.x + found.row;
    tile.source_rows = first.y - found.row;
  }
  return tile;
}

// How a warp walks through a tile: its lanes are beside each other along a row, in vectors, and what
// they leave over takes the next rows.
struct TileLanes {
  int row;     // the lane's first
  int step;    // rows between those of a lane
  int vector;  // the lane's first, of a row
  int lanes;   // beside each other

  __device__ __forceinline__ explicit TileLanes(int lanes_log2)
      : row(static_cast<int>(threadIdx.x % 32) >> lanes_log2),
        step(32 >> lanes_log2),
        vector(static_cast<int>(threadIdx.x % 32) & ((1 << lanes_log2) - 1)),
        lanes(1 << lanes_log2) {}
};

// The rows of the only copy, or zeros where it has none.
template <typename Loaded>
__device__ __forceinline__ void copy_tile(const SumTile& tile, const TileLanes& lanes,
                                          int64_t vectors, const Loaded* gFrom, int64_t stride,
                                          Loaded* gOut) {
  const int rows = static_cast<int>(tile.rows), source_rows = static_cast<int>(tile.source_rows);
  gFrom += lanes.row * stride;
  gOut += lanes.row * vectors;
  const int64_t from_step = lanes.step * stride, out_step = lanes.step * vectors;
  for (int64_t vector = lanes.vector; vector < vectors; vector += lanes.lanes) {
    const Loaded* gX = gFrom + vector;
    Loaded* gZ = gOut + vector;
#pragma unroll 1
    for (int row = lanes.row; row < rows; row += kItems * lanes.step) {
      Loaded rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        rX[i] = Loaded{};
        if (row + i * lanes.step < source_rows) rX[i] = __ldg(gX);
        gX += from_step;
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (row + i * lanes.step < rows) *gZ = rX[i];
        gZ += out_step;
      }
    }
  }
}

// The rows of all copies of the tile, added in their order.
template <typename Element, int kVector>
__device__ __forceinline__ void sum_tile(const SumCopiesParams& params, const SumTile& tile,
                                         const TileLanes& lanes,
                                         rows::Raw<Element, kVector>* gOut) {
  using Loaded = rows::Raw<Element, kVector>;
  using Elements = Vector<Element, kVector>;
  const int rows = static_cast<int>(tile.rows);
  const int64_t stride = params.stride / kVector;
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  const int64_t from_step = lanes.step * stride, out_step = lanes.step * vectors;
  for (int64_t vector = lanes.vector; vector < vectors; vector += lanes.lanes) {
#pragma unroll 1
    for (int row = lanes.row; row < rows; row += kPairItems * lanes.step) {
      const Loaded* gFrom =
          static_cast<const Loaded*>(params.grad_out) + (tile.row + row) * stride + vector;
      Sum<Element> sum[kPairItems][kVector] = {};
#pragma unroll 1
      for (int64_t place = tile.group; place < tile.group_end; place += 2) {
        Loaded rX[2][kPairItems];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const CopyRows copy = load_copy(params.copies, place + c, tile.group_end);
          const Loaded* gX = gFrom + copy.begin * stride;
          int64_t left = copy.len - tile.row;
          left = (left < rows ? left : rows) - row;
#pragma unroll
          for (int i = 0; i < kPairItems; ++i) {
            rX[c][i] = Loaded{};  // also where there is no second copy
            if (i * lanes.step < left) rX[c][i] = __ldg(gX);
            gX += from_step;
          }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int i = 0; i < kPairItems; ++i) {
#pragma unroll
            for (int e = 0; e < kVector; ++e) {
              sum[i][e] += to_sum(reinterpret_cast<const Elements&>(rX[c][i]).elems[e]);
            }
          }
        }
      }
      Loaded* gZ = gOut + row * vectors + vector;
#pragma unroll
      for (int i = 0; i < kPairItems; ++i) {
        Elements result;
#pragma unroll
        for (int e = 0; e < kVector; ++e) result.elems[e] = from_sum<Element>(sum[i][e]);
        if (row + i * lanes.step < rows) *gZ = reinterpret_cast<const Loaded&>(result);
        gZ += out_step;
      }
    }
  }
}

template <typename Element, int kVector, bool kFound>
__global__ __launch_bounds__(kThreads, kSumCtas) void sum_copies_kernel(
    const __grid_constant__ SumCopiesLaunch launch) {
  using Loaded = rows::Raw<Element, kVector>;
  const SumCopiesParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;  // in the last CTA alone
  const TileLanes lanes(launch.lanes_log2);
  SumTile tile;
  if constexpr (kFound) {
    ptx::griddepcontrol_wait();  // for tiles and copies
    tile = load_tile(params, index);
  } else {
    const JaggedTile found = find_tile<kCopyRows>(params.offsets, index);
    ptx::griddepcontrol_wait();  // for copies and their first ones
    tile = tile_of_groups(params, found);
  }
  if (tile.rows <= 0) return;
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  Loaded* gOut = static_cast<Loaded*>(params.out) + tile.begin * vectors;
  if (tile.group_end - tile.group <= 1) {
    const int64_t stride = params.stride / kVector;
    copy_tile(tile, lanes, vectors,
              static_cast<const Loaded*>(params.grad_out) + tile.source * stride, stride, gOut);
  } else {
    sum_tile<Element, kVector>(params, tile, lanes, gOut);
  }
}

template <typename Element, int kVector>
cudaError_t launch_sum_copies(const SumCopiesParams& params, cudaStream_t stream) {
  const int log2 = rows::lanes_log2((params.columns + kVector - 1) / kVector);
  if (params.tiles != nullptr) {
    return launch_dependent<sum_copies_kernel<Element, kVector, true>>(
        SumCopiesLaunch{params, log2, params.num_tiles}, {(params.num_tiles + kWarps - 1) / kWarps},
        kThreads, 0, stream, "cuda.jagged_index_select_backward");
  }
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kCopyRows);
  return launch_dependent<sum_copies_kernel<Element, kVector, false>>(
      SumCopiesLaunch{params, log2, tiles}, {(tiles + kWarps - 1) / kWarps}, kThreads, 0, stream,
      "cuda.jagged_index_select_backward.sorted");
}

// What the lanes of a warp share of a tile: its rows, and how they are spread over lanes.
struct CopyTile {
  int64_t row;  // in its sequence
  int rows;
  int64_t vectors;  // of a row
  int lanes_log2;

  __device__ int first_row() const { return static_cast<int>(threadIdx.x % 32) >> lanes_log2; }
  __device__ int step() const { return 32 >> lanes_log2; }
};

struct WriteCopiesLaunch {
  WriteCopiesParams params;
  int lanes_log2;
  int64_t tiles, warps;
};

// The rows of a tile of x, read once, to all copies of its sequence; `own` is the lane's of the first
// 32. All lanes stay in the loops, since each hands on the copy that it has looked up.
template <typename Unit>
__device__ __forceinline__ void write_tile(const WriteCopiesParams& params, const CopyTile& tile,
                                           const Unit* gX, int64_t group, int64_t group_end,
                                           CopyRows own) {
  const int lane = threadIdx.x % 32, lanes = 1 << tile.lanes_log2, step = tile.step();
  int64_t loaded = group;
  for (int64_t first_unit = 0; first_unit < tile.vectors; first_unit += lanes) {
    const int64_t unit = first_unit + (lane & (lanes - 1));
    const int rows = unit < tile.vectors ? tile.rows : 0;
#pragma unroll 1
    for (int first = 0; first < tile.rows; first += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first + tile.first_row() + i * step;
        rX[i] = Unit{};
        if (row < rows) rX[i] = __ldg(gX + row * params.stride + unit);
      }
      for (int64_t base = group; base < group_end; base += 32) {
        if (base != loaded) {
          own = load_copy(params.copies, base + lane, group_end);
          loaded = base;
        }
        const int copies = group_end - base < 32 ? static_cast<int>(group_end - base) : 32;
#pragma unroll 1
        for (int copy = 0; copy < copies; ++copy) {
          const int64_t begin = __shfl_sync(0xffffffffu, own.begin, copy) + tile.row;
          const int64_t len = __shfl_sync(0xffffffffu, own.len, copy) - tile.row;
          Unit* gOut = static_cast<Unit*>(params.out) + begin * tile.vectors + unit;
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int row = first + tile.first_row() + i * step;
            if (row < rows && row < len) gOut[row * tile.vectors] = rX[i];
          }
        }
      }
    }
  }
}

// Zeros for the rows of the result that no copy has, all behind the last.
template <typename Unit>
__device__ __forceinline__ void fill_tail(const WriteCopiesLaunch& launch, int64_t warp) {
  const WriteCopiesParams& params = launch.params;
  const int64_t units =
      (params.taken.total - clamped_offset(params.taken, params.num_copies)) * params.row_units;
  Unit* gEnd = static_cast<Unit*>(params.out) + params.taken.total * params.row_units;
  for (int64_t unit = warp * 32 + threadIdx.x % 32; unit < units; unit += launch.warps * 32) {
    gEnd[-1 - unit] = Unit{};
  }
}

template <typename Unit, int kTileRows>
__global__ __launch_bounds__(kThreads, kWriteCtas) void write_copies_kernel(
    const __grid_constant__ WriteCopiesLaunch launch) {
  const WriteCopiesParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  const bool is_tile = index < launch.tiles;
  const JaggedTile found = find_tile<kTileRows>(params.offsets, is_tile ? index : 0);
  ptx::griddepcontrol_wait();  // for copies and groups
  const int64_t left = found.rows.len - found.row;
  if (is_tile && left > 0 && found.seq >= 0) {
    const CopyTile tile{found.row, left < kTileRows ? static_cast<int>(left) : kTileRows,
                        params.row_units, launch.lanes_log2};
    const int64_t num_copies = params.num_copies;
    int64_t group = __ldg(params.groups + found.seq);
    int64_t group_end = __ldg(params.groups + found.seq + 1);
    const longlong2 first = __ldg(reinterpret_cast<const longlong2*>(params.firsts + found.seq));
    group = group < 0 ? 0 : group;
    group_end = group_end > num_copies ? num_copies : group_end;
    const Unit* gX =
        static_cast<const Unit*>(params.x) + (found.rows.begin + found.row) * params.stride;
    if (group_end - group == 1) {
      write_tile(params, tile, gX, group, group_end, {first.x, first.y});
    } else if (group_end > group) {
      const CopyRows own = load_copy(params.copies, group + threadIdx.x % 32, group_end);
      write_tile(params, tile, gX, group, group_end, own);
    }
  }
  fill_tail<Unit>(launch, index);
}

}  // namespace

cudaError_t launch_jagged_index_select_plan(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_index_select_plan");
}

cudaError_t launch_group_copies(const GroupCopiesParams& params, cudaStream_t stream) {
  if (params.num_copies > kMostCounted || params.num_seqs > kMostCounted) {
    return cudaErrorInvalidValue;
  }
  const Grid grid{(params.num_copies + params.num_seqs + 1 + 31) / 32};
  return launch<group_copies_kernel>(params, grid, kGroupWarps * 32, 0, stream, nullptr);
}

cudaError_t launch_follow_order(const FollowOrderParams& params, cudaStream_t stream) {
  if (params.num_copies == 0) return cudaSuccess;
  const Grid grid{(params.num_copies + kFollowThreads - 1) / kFollowThreads};
  return launch<follow_order_kernel>(params, grid, kFollowThreads, 0, stream, nullptr);
}

int found_tile_log2(int64_t row_bytes) {
  int log2 = 7;
  while (log2 > 2 && row_bytes << log2 > kTileBytes) --log2;
  return log2;
}

cudaError_t launch_find_tiles(const FindTilesParams& params, cudaStream_t stream) {
  if (params.num_copies > kMostCounted || params.num_seqs > kMostCounted) {
    return cudaErrorInvalidValue;
  }
  const int64_t ctas = (params.num_seqs + 2 + kFindWarps - 1) / kFindWarps;
  const Grid grid{ctas, (kFewestCtas + ctas - 1) / ctas};
  return launch<find_tiles_kernel>(params, grid, kFindThreads, 0, stream, nullptr);
}

cudaError_t launch_jagged_index_select(const WriteCopiesParams& params, cudaStream_t stream) {
  const auto launch_tiles = [&](auto unit, auto tile_rows) {
    constexpr int kTileRows = decltype(tile_rows)::value;
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileRows);
    // At least so many that zeros behind the last copy take few steps.
    const int64_t ctas = (std::max(tiles, params.taken.total / kRows) + kWarps - 1) / kWarps;
    const WriteCopiesLaunch arguments{params, rows::lanes_log2(params.row_units), tiles,
                                      ctas * kWarps};
    return launch_dependent<write_copies_kernel<decltype(unit), kTileRows>>(
        arguments, {ctas}, kThreads, 0, stream, "cuda.jagged_index_select.copies");
  };
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    return params.row_units * params.unit_bytes <= kNarrowBytes
               ? launch_tiles(unit, std::integral_constant<int, 2 * kCopyRows>{})
               : launch_tiles(unit, std::integral_constant<int, kCopyRows>{});
  });
}

cudaError_t launch_jagged_index_select_backward(const SumCopiesParams& params,
                                                cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return params.vectors ? launch_sum_copies<Element, 16 / sizeof(Element)>(params, stream)
                          : launch_sum_copies<Element, 1>(params, stream);
  });
}

}  // namespace jagged_cuda
