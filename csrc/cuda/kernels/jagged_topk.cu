// jagged_topk: keep[t] says whether row t is among the k best of its sequence.
//
// Scores become unsigned keys of the same order (contract/order.h), and the sequence's threshold is
// the k-th largest key. Rows above it are kept, and of those that equal it as many of the last as
// there is room for.
//
// Grid: x, first a CTA for each slab of kSlab rows, which takes the one sequence of more than kSlab
// rows that begins in the slab, if there is one, and the slab's rows outside every sequence; then
// CTAs whose warps take one of the other sequences each. So one launch serves both, and long
// sequences start first.
//
// A warp holds its sequence's keys in registers, kItems in each lane, and finds the threshold bit by
// bit: a bit is set if k keys are at least as large. It then counts equal ones from the last row
// back. Reads: one.
//
// A CTA finds the threshold by radix: a histogram of the highest 8 bits of all keys says in which of
// 256 bins the k-th largest lies, one of the next 8 bits of the keys in that bin goes on. Where more
// rows equal the threshold than are wanted, bits of their positions do the same. So a sequence is
// read once per byte of a key, usually from L2, and once for its result: linear in its length.
//
// A sequence of more than kGiant rows is taken by a cluster of kGiantCtas CTAs, where the GPU has
// clusters, in a launch of its own, which has one for each slab of kGiant rows and runs beside the other. Each counts its share
// of the rows, and adds the counts of all, so that all find the same bins.
//
// Shared memory: 256 counts twice, for passes in turn, their sums over the cluster, and what is found
// (3,084 bytes). Barriers in each pass: one after the counts are cleared, one, of the cluster, when all
// rows are counted, one when they are added, one when the bin is found. In the pass after the next all
// have read the counts that are cleared then, and a last barrier of the cluster keeps each CTA until
// nobody reads its counts. Counts are of integers, so that their order changes nothing:
// deterministic. An empty sequence has no row to write. One sequence may have up to 2^32 - 1 rows.
#include "cuda/kernels/jagged_topk.h"

#include "contract/order.h"
#include "cuda/kernels/prim/cluster.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/row_type.cuh"

namespace jagged_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 8;           // keys of a lane
constexpr int kSlab = 32 * kItems;  // rows that a warp can hold
constexpr int kLoads = 4;           // scores that a thread of a CTA has in flight
constexpr int kBins = 256;
constexpr int kFew = 4;  // lanes that add their counts one by one, before they look for equals
constexpr int kGiant = 8192;
constexpr int kGiantThreads = 512;
constexpr int kGiantLoads = 16;
constexpr int kGiantCtas = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Element>
__device__ __forceinline__ auto key_of(Element score) {
  if constexpr (std::is_same_v<Element, __half>) {
    return ordered_float_bits<uint16_t>(bits_of<uint16_t>(score), kHalfInfinity);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return ordered_float_bits<uint16_t>(bits_of<uint16_t>(score), kBFloat16Infinity);
  } else {
    return ordered_key(score);
  }
}

template <typename Element>
using KeyOf = decltype(key_of(Element{}));

struct TopkLaunch {
  JaggedTopkParams params;
  int64_t slabs;
  int64_t longest;  // of a sequence that a CTA takes; clusters take longer ones
};

struct SharedStorage {
  unsigned counts[2][kBins];
  unsigned sums[kBins];  // over the cluster
  unsigned found_bin;
  unsigned found_count;  // of rows in that bin
  unsigned found_left;   // how many of these are still wanted
};

// --- a warp, for up to kSlab rows

template <typename Element>
__device__ __forceinline__ void keep_best_of_short(const Element* gScore, uint8_t* gKeep, int len,
                                                   int k) {
  using Key = KeyOf<Element>;
  const int lane = threadIdx.x % 32, items = (len + 31) / 32;
  Key rKey[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    // 0 is never counted: thresholds that are tried are larger.
    rKey[i] = i * 32 + lane < len ? key_of(gScore[i * 32 + lane]) : Key(0);
  }
  const auto count = [&](auto counted) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i < items) own += counted(rKey[i]) ? 1 : 0;
    }
    return __reduce_add_sync(kAllLanes, own);
  };
  Key threshold = 0;
#pragma unroll 1
  for (int bit = 8 * sizeof(Key) - 1; bit >= 0; --bit) {
    const Key tried = static_cast<Key>(threshold | Key(Key(1) << bit));
    if (count([&](Key key) { return key >= tried; }) >= k) threshold = tried;
  }
  // Rows that equal the threshold, of which the last are kept.
  const int wanted = k - count([&](Key key) { return key > threshold; });
  const unsigned later_lanes = ~((2u << lane) - 1);
  int later = 0;
#pragma unroll
  for (int i = kItems - 1; i >= 0; --i) {
    const int row = i * 32 + lane;
    const bool equal = row < len && rKey[i] == threshold;
    const unsigned equal_lanes = __ballot_sync(kAllLanes, equal);
    const bool kept =
        rKey[i] > threshold || (equal && later + __popc(equal_lanes & later_lanes) < wanted);
    later += __popc(equal_lanes);
    if (row < len) gKeep[row] = kept ? 1 : 0;
  }
}

// --- a CTA, or a cluster, for any length

// The CTAs that share a sequence's rows.
template <int kTeamThreads, int kTeamCtas, int kTeamLoads>
struct Team {
  static constexpr int kCtas = kTeamCtas;
  static constexpr int kLoads = kTeamLoads;
  static constexpr int kStep = kTeamThreads * kTeamCtas;
  int thread = static_cast<int>(blockIdx.x) % kTeamCtas * kTeamThreads + threadIdx.x;
  int pass = 0;
};

// Counts the rows in each bin, where bin_of(row, score) says in which a row is, or none (-1), and
// finds the bin in which the `wanted`-th from the highest lies.
template <typename Element, typename Rows, typename BinOf>
__device__ __forceinline__ void find_bin(const Element* gScore, int64_t len, unsigned wanted,
                                         SharedStorage& storage, Rows& team, BinOf bin_of) {
  const int lane = threadIdx.x % 32;
  unsigned* counts = storage.counts[team.pass++ % 2];
  if (threadIdx.x < kBins) counts[threadIdx.x] = 0;
  __syncthreads();  // all counts are cleared
  // All lanes of a warp stay, since they look for equals.
  for (int64_t first = team.thread - lane; first < len; first += Rows::kLoads * Rows::kStep) {
    Element rScore[Rows::kLoads];
#pragma unroll
    for (int i = 0; i < Rows::kLoads; ++i) {
      const int64_t row = first + i * Rows::kStep + lane;
      rScore[i] = row < len ? gScore[row] : Element{};
    }
#pragma unroll
    for (int i = 0; i < Rows::kLoads; ++i) {
      if (first + i * Rows::kStep >= len) break;
      const int64_t row = first + i * Rows::kStep + lane;
      const int bin = row < len ? bin_of(row, rScore[i]) : -1;
      const unsigned counted = __ballot_sync(kAllLanes, bin >= 0);
      if (__popc(counted) <= kFew) {
        if (bin >= 0) atomicAdd(&counts[bin], 1u);
        continue;
      }
      // Many scores have the same sign and exponent: one lane adds for all that share a bin.
      const unsigned peers = __match_any_sync(kAllLanes, bin);
      if (bin >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) {
        atomicAdd(&counts[bin], static_cast<unsigned>(__popc(peers)));
      }
    }
  }
  if constexpr (Rows::kCtas > 1) {
    ptx::barrier_cluster();  // all rows are counted
    if (threadIdx.x < kBins) {
      unsigned sum = 0;
#pragma unroll
      for (int cta = 0; cta < Rows::kCtas; ++cta) {
        sum += ptx::ld_shared_cluster(
            ptx::mapa_shared_cluster(&counts[threadIdx.x], static_cast<uint32_t>(cta)));
      }
      storage.sums[threadIdx.x] = sum;
    }
    counts = storage.sums;
  }
  __syncthreads();  // all rows are counted, and the counts added
  if (threadIdx.x < 32) {
    constexpr int kLaneBins = kBins / 32;
    const int highest = kBins - 1 - lane * kLaneBins;  // lanes go down from the highest bin
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < kLaneBins; ++i) own += counts[highest - i];
    unsigned up_to = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    unsigned above = up_to - own;
    if (above < wanted && wanted <= up_to) {
      int bin = highest;
      while (above + counts[bin] < wanted) above += counts[bin--];
      storage.found_bin = static_cast<unsigned>(bin);
      storage.found_count = counts[bin];
      storage.found_left = wanted - above;
    }
  }
  __syncthreads();  // the bin is found
}

template <typename Rows, typename Element>
__device__ __forceinline__ void keep_best_of_long(const Element* gScore, uint8_t* gKeep,
                                                  int64_t len, int64_t k, SharedStorage& storage) {
  Rows team;
  if (k == 0 || k == len) {
    for (int64_t row = team.thread; row < len; row += Rows::kStep) gKeep[row] = k > 0 ? 1 : 0;
    return;
  }
  using Key = KeyOf<Element>;
  // The highest bits of the threshold, and how many of the rows that share them are wanted.
  uint64_t threshold = 0;
  unsigned wanted = static_cast<unsigned>(k);
  bool is_exact = false;  // all rows that share them are
  int shift = 8 * sizeof(Key);
#pragma unroll 1
  while (shift > 0 && !is_exact) {
    shift -= 8;
    find_bin(gScore, len, wanted, storage, team, [&](int64_t, Element score) {
      const uint64_t key = key_of(score);
      return key >> shift >> 8 == threshold ? static_cast<int>(key >> shift & 255) : -1;
    });
    threshold = threshold << 8 | storage.found_bin;
    wanted = storage.found_left;
    is_exact = wanted == storage.found_count;
  }
  threshold <<= shift;
  // The same for the positions of rows that equal the threshold.
  uint64_t first_equal = 0;
  int position_shift = 8;
  while ((len - 1) >> position_shift > 0) position_shift += 8;
#pragma unroll 1
  while (position_shift > 0 && !is_exact) {
    position_shift -= 8;
    find_bin(gScore, len, wanted, storage, team, [&](int64_t row, Element score) {
      const uint64_t position = static_cast<uint64_t>(row);
      const bool is_candidate =
          key_of(score) == threshold && position >> position_shift >> 8 == first_equal;
      return is_candidate ? static_cast<int>(position >> position_shift & 255) : -1;
    });
    first_equal = first_equal << 8 | storage.found_bin;
    wanted = storage.found_left;
    is_exact = wanted == storage.found_count;
  }
  first_equal <<= position_shift;
#pragma unroll 4
  for (int64_t row = team.thread; row < len; row += Rows::kStep) {
    const uint64_t key = key_of(gScore[row]);
    // Without ties at the threshold, keys that share its bits are at least as large.
    const bool kept = key > threshold || (key == threshold && row >= first_equal);
    gKeep[row] = kept ? 1 : 0;
  }
  if constexpr (Rows::kCtas > 1) ptx::barrier_cluster();  // nobody reads this CTA's counts now
}

// --- the kernels

// The sequence of more than kRows rows that begins in slab `slab` of as many, if there is one.
template <int kRows>
__device__ __forceinline__ JaggedTile find_long(const OffsetsView& offsets, int64_t slab) {
  const int64_t begin = slab * kRows;
  const int64_t last = (begin + kRows < offsets.total ? begin + kRows : offsets.total) - 1;
  // It has the last of these rows.
  const Segment segment =
      find_segment(offsets, [&](int64_t bound, int64_t) { return bound <= last; });
  JaggedTile tile = tile_of(offsets, segment, 0);
  if (tile.rows.begin < begin || tile.rows.len <= kRows) tile.seq = -1;
  return tile;
}

template <typename Element>
__device__ __forceinline__ void keep_best_of_slab(const TopkLaunch& launch, int64_t slab,
                                                  SharedStorage& storage) {
  const JaggedTopkParams& params = launch.params;
  const int64_t begin = slab * kSlab, total = params.offsets.total;
  const int64_t end = begin + kSlab < total ? begin + kSlab : total;
  const int64_t row = begin + threadIdx.x;
  if (row < end && (row < clamped_offset(params.offsets, 0) ||
                    row >= clamped_offset(params.offsets, params.offsets.num_seqs))) {
    params.keep[row] = 0;
  }
  const JaggedTile tile = find_long<kSlab>(params.offsets, slab);
  if (tile.seq < 0 || tile.rows.len > launch.longest) return;
  keep_best_of_long<Team<kThreads, 1, kLoads>>(
      static_cast<const Element*>(params.score) + tile.rows.begin, params.keep + tile.rows.begin,
      tile.rows.len, clamped_count(params.k, tile.seq, tile.rows.len), storage);
}

template <typename Element>
__global__ __launch_bounds__(kGiantThreads) void topk_giant_kernel(
    const __grid_constant__ TopkLaunch launch) {
  __shared__ SharedStorage storage;
  ptx::griddepcontrol_launch_dependents();  // the other kernel has sequences of its own
  const JaggedTopkParams& params = launch.params;
  const JaggedTile tile = find_long<kGiant>(params.offsets, blockIdx.x / kGiantCtas);
  if (tile.seq < 0) return;  // the whole cluster
  keep_best_of_long<Team<kGiantThreads, kGiantCtas, kGiantLoads>>(
      static_cast<const Element*>(params.score) + tile.rows.begin, params.keep + tile.rows.begin,
      tile.rows.len, clamped_count(params.k, tile.seq, tile.rows.len), storage);
}

template <typename Element>
__global__ __launch_bounds__(kThreads) void topk_kernel(const __grid_constant__ TopkLaunch launch) {
  static_assert(kThreads == kBins && kThreads >= kSlab, "a thread for each bin and row of a slab");
  __shared__ SharedStorage storage;
  const JaggedTopkParams& params = launch.params;
  if (blockIdx.x == 0) ptx::griddepcontrol_wait();  // this kernel ends after that of giants
  if (blockIdx.x < launch.slabs) {
    keep_best_of_slab<Element>(launch, blockIdx.x, storage);
    return;
  }
  const int64_t seq = (blockIdx.x - launch.slabs) * kWarps + threadIdx.x / 32;
  if (seq >= params.offsets.num_seqs) return;
  const RowRange range = sequence_rows(params.offsets, seq);
  if (range.len == 0 || range.len > kSlab) return;
  const int len = static_cast<int>(range.len);
  const int k = static_cast<int>(clamped_count(params.k, seq, len));
  uint8_t* gKeep = params.keep + range.begin;
  if (k == 0 || k == len) {
    for (int i = threadIdx.x % 32; i < len; i += 32) gKeep[i] = k > 0 ? 1 : 0;
    return;
  }
  keep_best_of_short(static_cast<const Element*>(params.score) + range.begin, gKeep, len, k);
}

}  // namespace

cudaError_t launch_jagged_topk(const JaggedTopkParams& params, cudaStream_t stream) {
  const int64_t total = params.offsets.total, slabs = (total + kSlab - 1) / kSlab;
  const int64_t ctas = slabs + (params.offsets.num_seqs + kWarps - 1) / kWarps;
  const bool clusters = total > kGiant && has_wgmma();
  const TopkLaunch arguments{params, slabs, clusters ? kGiant : total};
  return rows::with_row_type(params.type, [&](auto element) {
    using Element = rows::Compared<decltype(element)>;
    if (clusters) {
      const Grid grid{(total + kGiant - 1) / kGiant * kGiantCtas};
      const cudaError_t error = launch_clusters<topk_giant_kernel<Element>>(
          arguments, grid, kGiantCtas, kGiantThreads, stream);
      if (error != cudaSuccess) return error;
      return launch_dependent<topk_kernel<Element>>(arguments, {ctas}, kThreads, 0, stream,
                                                    "cuda.jagged_topk");
    }
    return launch<topk_kernel<Element>>(arguments, {ctas}, kThreads, 0, stream, "cuda.jagged_topk");
  });
}

}  // namespace jagged_cuda
