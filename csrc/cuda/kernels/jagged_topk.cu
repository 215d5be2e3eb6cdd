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
// Shared memory: 256 counts and what is found (1,048 bytes). Barriers in each pass: one after the
// counts are cleared, one when all rows are counted, one when the bin is found. Counts are of
// integers, so that their order changes nothing: deterministic. An empty sequence has no row to
// write. One sequence may have up to 2^32 - 1 rows.
#include "cuda/kernels/jagged_topk.h"

#include "contract/order.h"
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
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Element>
__device__ __forceinline__ auto key_of(Element score) {
  if constexpr (std::is_same_v<Element, __half>) {
    return ordered_float_bits<uint16_t>(bits_of<uint16_t>(score), kHalfInfinity);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return ordered_float_bits<uint16_t>(bits_of<uint16_t>(score), kBFloat16Infinity);
  } else if constexpr (std::is_same_v<Element, rows::Truth>) {
    return score.value;
  } else {
    return ordered_key(score);
  }
}

template <typename Element>
using KeyOf = decltype(key_of(Element{}));

struct TopkLaunch {
  JaggedTopkParams params;
  int64_t slabs;
};

struct SharedStorage {
  unsigned counts[kBins];
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

// --- a CTA, for any length

// Counts the rows in each bin, where bin_of(row, score) says in which a row is, or none (-1), and
// finds the bin in which the `wanted`-th from the highest lies.
template <typename Element, typename BinOf>
__device__ __forceinline__ void find_bin(const Element* gScore, int64_t len, unsigned wanted,
                                         SharedStorage& storage, BinOf bin_of) {
  const int lane = threadIdx.x % 32;
  storage.counts[threadIdx.x] = 0;
  __syncthreads();  // all counts are cleared
  for (int64_t first = 0; first < len; first += kLoads * kThreads) {
    Element rScore[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t row = first + i * kThreads + threadIdx.x;
      rScore[i] = row < len ? gScore[row] : Element{};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t row = first + i * kThreads + threadIdx.x;
      const int bin = row < len ? bin_of(row, rScore[i]) : -1;
      // Many scores have the same sign and exponent: one lane adds for all that share a bin.
      const unsigned peers = __match_any_sync(kAllLanes, bin);
      if (bin >= 0 && lane == __ffs(static_cast<int>(peers)) - 1) {
        atomicAdd(&storage.counts[bin], static_cast<unsigned>(__popc(peers)));
      }
    }
  }
  __syncthreads();  // all rows are counted
  if (threadIdx.x < 32) {
    constexpr int kLaneBins = kBins / 32;
    const int highest = kBins - 1 - lane * kLaneBins;  // lanes go down from the highest bin
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < kLaneBins; ++i) own += storage.counts[highest - i];
    unsigned up_to = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    unsigned above = up_to - own;
    if (above < wanted && wanted <= up_to) {
      int bin = highest;
      while (above + storage.counts[bin] < wanted) above += storage.counts[bin--];
      storage.found_bin = static_cast<unsigned>(bin);
      storage.found_count = storage.counts[bin];
      storage.found_left = wanted - above;
    }
  }
  __syncthreads();  // the bin is found
}

template <typename Element>
__device__ __forceinline__ void keep_best_of_long(const Element* gScore, uint8_t* gKeep,
                                                  int64_t len, int64_t k, SharedStorage& storage) {
  using Key = KeyOf<Element>;
  // The highest bits of the threshold, and how many of the rows that share them are wanted.
  uint64_t threshold = 0;
  unsigned wanted = static_cast<unsigned>(k);
  bool is_exact = false;  // all rows that share them are
  int shift = 8 * sizeof(Key);
#pragma unroll 1
  while (shift > 0 && !is_exact) {
    shift -= 8;
    find_bin(gScore, len, wanted, storage, [&](int64_t, Element score) {
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
    find_bin(gScore, len, wanted, storage, [&](int64_t row, Element score) {
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
  for (int64_t row = threadIdx.x; row < len; row += kThreads) {
    const uint64_t key = key_of(gScore[row]);
    // Without ties at the threshold, keys that share its bits are at least as large.
    const bool kept = key > threshold || (key == threshold && row >= first_equal);
    gKeep[row] = kept ? 1 : 0;
  }
}

// --- the kernel

template <typename Element>
__device__ __forceinline__ void keep_best_of_slab(const JaggedTopkParams& params, int64_t slab,
                                                  SharedStorage& storage) {
  const int64_t begin = slab * kSlab, total = params.offsets.total;
  const int64_t end = begin + kSlab < total ? begin + kSlab : total;
  const int64_t row = begin + threadIdx.x;
  if (row < end && (row < clamped_offset(params.offsets, 0) ||
                    row >= clamped_offset(params.offsets, params.offsets.num_seqs))) {
    params.keep[row] = 0;
  }
  // A sequence of more than kSlab rows that begins here has the last of these rows.
  const Segment segment =
      find_segment(params.offsets, [&](int64_t bound, int64_t) { return bound <= end - 1; });
  const JaggedTile tile = tile_of(params.offsets, segment, 0);
  if (tile.seq < 0 || tile.rows.begin < begin || tile.rows.len <= kSlab) return;
  const int64_t k = clamped_count(params.k, tile.seq, tile.rows.len);
  uint8_t* gKeep = params.keep + tile.rows.begin;
  if (k == 0 || k == tile.rows.len) {
    for (int64_t i = threadIdx.x; i < tile.rows.len; i += kThreads) gKeep[i] = k > 0 ? 1 : 0;
    return;
  }
  const Element* gScore = static_cast<const Element*>(params.score) + tile.rows.begin;
  keep_best_of_long(gScore, gKeep, tile.rows.len, k, storage);
}

template <typename Element>
__global__ __launch_bounds__(kThreads) void topk_kernel(const __grid_constant__ TopkLaunch launch) {
  static_assert(kThreads == kBins && kThreads >= kSlab, "a thread for each bin and row of a slab");
  __shared__ SharedStorage storage;
  const JaggedTopkParams& params = launch.params;
  if (blockIdx.x < launch.slabs) {
    keep_best_of_slab<Element>(params, blockIdx.x, storage);
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
  const int64_t slabs = (params.offsets.total + kSlab - 1) / kSlab;
  const int64_t ctas = slabs + (params.offsets.num_seqs + kWarps - 1) / kWarps;
  return rows::with_row_type(params.type, [&](auto element) {
    return launch<topk_kernel<decltype(element)>>(TopkLaunch{params, slabs}, {ctas}, kThreads, 0,
                                                  stream, "cuda.jagged_topk");
  });
}

}  // namespace jagged_cuda
