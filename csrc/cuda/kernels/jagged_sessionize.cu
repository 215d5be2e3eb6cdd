// jagged_sessionize: a session starts at row t of a sequence if t is its first row, or if
// time[t] - time[t - 1] > gap.
//
//   session_offsets[number of starts before t] = t      for each start t, then the last offset
//   first_session[b] = number of starts before offsets[b]
//
// A scan in two passes, without atomics that could change an order, and without a CTA that waits for
// another. Grid of both: x, up to kMostCtas CTAs, each with an equal share of the rows, a multiple of
// kTileRows. A third kernel has a thread for each sequence.
//
// mark_starts: for each tile of kTileRows rows the CTA marks the sequences' first rows in shared
// memory, its threads sharing out those that begin in the tile; then each warp makes words of 32
// rows' bits, by ballots, which it keeps for the second kernel with the count of the CTA.
//
// write_starts: adds the counts of all CTAs before its own (at most kMostCtas loads per CTA, whatever
// T is); then each thread takes a word, and writes its starts behind those of the threads before
// it. The CTAs share out what follows the last start, too.
//
// find_first_sessions: a binary search among the starts.
//
// Shared memory: 128 bytes of bits; 8 counts of warps. Barriers: those of the marks (cleared, set,
// read) and of the scans. Rows outside every sequence start nothing; an empty sequence's mark is
// that of the row behind it, where another one starts or which is outside.
#include "cuda/kernels/jagged_sessionize.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/row_type.cuh"
#include "cuda/kernels/rows/scan.cuh"

#include <algorithm>

namespace jagged_cuda {
namespace {

using rows::kScanThreads;
using rows::kScanWarps;
using rows::ScanStorage;
using rows::sum_before;

constexpr int kTileWords = 32;
constexpr int kTileRows = 32 * kTileWords;
constexpr int64_t kMostCtas = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;

// Rows of each CTA but the last.
__host__ __device__ inline int64_t rows_of_cta(int64_t total, int64_t ctas) {
  return (total + ctas * kTileRows - 1) / (ctas * kTileRows) * kTileRows;
}

template <typename Element>
__device__ __forceinline__ bool exceeds(const SessionGap& gap, Element before, Element after) {
  if constexpr (std::is_integral_v<Element> || sizeof(Element) == 8) {
    return gap.is_exceeded(before, after);
  } else {
    return gap.is_exceeded(to_sum(before), to_sum(after));
  }
}

// The first of the offsets that lie at or behind `row`; all lanes of a warp together.
__device__ __forceinline__ int64_t first_offset_from(const OffsetsView& offsets, int64_t row) {
  return find_segment(offsets,
                      [&](int64_t bound, int64_t index) { return index == 0 || bound < row; })
      .index;
}

template <typename Element>
__global__ __launch_bounds__(kScanThreads) void mark_starts(const JaggedSessionizeParams params) {
  __shared__ uint32_t sMarks[kTileWords];
  __shared__ ScanStorage<int> sScan;
  const OffsetsView& offsets = params.offsets;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t share = rows_of_cta(offsets.total, gridDim.x), begin = blockIdx.x * share;
  const int64_t end = begin + share < offsets.total ? begin + share : offsets.total;
  const int64_t first_row = clamped_offset(offsets, 0);
  const int64_t end_row = clamped_offset(offsets, offsets.num_seqs);
  const Element* gTime = static_cast<const Element*>(params.time);
  int64_t next_seq = first_offset_from(offsets, begin);
  int count = 0;
  for (int64_t tile = begin; tile < end; tile += kTileRows) {
    if (threadIdx.x < kTileWords) sMarks[threadIdx.x] = 0;
    __syncthreads();  // marks are cleared
    for (int here = kScanThreads; here == kScanThreads;) {
      const int64_t seq = next_seq + threadIdx.x;
      const int64_t row = seq < offsets.num_seqs ? clamped_offset(offsets, seq) - tile : kTileRows;
      // Wrong offsets may lie before the tile.
      if (row >= 0 && row < kTileRows) atomicOr(&sMarks[row / 32], 1u << (row % 32));
      here = __syncthreads_count(row < kTileRows);  // marks are set
      next_seq += here;
    }
#pragma unroll
    for (int i = 0; i < kTileWords / kScanWarps; ++i) {
      const int word = i * kScanWarps + warp;
      const int64_t row = tile + word * 32 + lane;
      bool starts = false;
      if (row >= first_row && row < end_row) {
        starts = (sMarks[word] >> lane & 1) != 0 || row == 0 ||
                 exceeds(params.gap, gTime[row - 1], gTime[row]);
      }
      const unsigned bits = __ballot_sync(kAllLanes, starts);
      if (lane == 0) {
        count += __popc(bits);
        if (tile + word * 32 < end) params.starts[tile / 32 + word] = bits;
      }
    }
    __syncthreads();  // all have read the marks
  }
  int sum = 0;
  sum_before(count, sScan, sum);
  if (threadIdx.x == 0) params.counts[blockIdx.x] = sum;
}

__device__ __forceinline__ void store_offset(void* data, bool wide, int64_t index, int64_t value) {
  if (wide) {
    static_cast<int64_t*>(data)[index] = value;
  } else {
    static_cast<int*>(data)[index] = static_cast<int>(value);
  }
}

__global__ __launch_bounds__(kScanThreads) void write_starts(const JaggedSessionizeParams params) {
  __shared__ ScanStorage<int64_t> sBefore, sAll;
  __shared__ ScanStorage<int> sScan;
  const OffsetsView& offsets = params.offsets;
  const int64_t ctas = gridDim.x, share = rows_of_cta(offsets.total, ctas);
  const int64_t begin = blockIdx.x * share / 32;
  const int64_t words = (offsets.total + 31) / 32;
  const int64_t end = begin + share / 32 < words ? begin + share / 32 : words;
  int64_t own_before = 0, own_all = 0, before = 0, all = 0;
  for (int64_t cta = threadIdx.x; cta < ctas; cta += kScanThreads) {
    const int64_t count = params.counts[cta];
    own_all += count;
    if (cta < blockIdx.x) own_before += count;
  }
  sum_before(own_before, sBefore, before);
  sum_before(own_all, sAll, all);
  for (int64_t first = begin; first < end; first += kScanThreads) {
    const int64_t word = first + threadIdx.x;
    const uint32_t bits = word < end ? params.starts[word] : 0;
    int sum = 0;
    int64_t session = before + sum_before(__popc(bits), sScan, sum);
    for (uint32_t left = bits; left != 0; left &= left - 1, ++session) {
      // The one past the capacity is where the last session that fits ends.
      if (session > params.sessions) break;
      store_offset(params.session_offsets, offsets.wide, session,
                   word * 32 + __ffs(static_cast<int>(left)) - 1);
    }
    before += sum;
    __syncthreads();  // all have read the scan
  }
  const int64_t end_row = clamped_offset(offsets, offsets.num_seqs);
  for (int64_t session = all + blockIdx.x * int64_t{kScanThreads} + threadIdx.x;
       session <= params.sessions; session += ctas * kScanThreads) {
    store_offset(params.session_offsets, offsets.wide, session, end_row);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) params.counts[ctas] = all;
}

__global__ __launch_bounds__(kScanThreads) void find_first_sessions(
    const JaggedSessionizeParams params) {
  const OffsetsView& offsets = params.offsets;
  const int64_t seq = blockIdx.x * int64_t{kScanThreads} + threadIdx.x;
  if (seq > offsets.num_seqs) return;
  const int64_t row = clamped_offset(offsets, seq);
  // What is behind the last start is no less than any offset.
  int64_t low = 0, high = params.sessions;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t start =
        offsets.wide
            ? static_cast<const int64_t*>(params.session_offsets)[middle]
            : static_cast<int64_t>(static_cast<const int*>(params.session_offsets)[middle]);
    if (start < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  store_offset(params.first_session, offsets.wide, seq, low);
}

}  // namespace

int64_t num_session_ctas(int64_t total) {
  return std::clamp<int64_t>((total + kTileRows - 1) / kTileRows, 1, kMostCtas);
}

int64_t num_start_words(int64_t total) { return (total + 31) / 32; }

cudaError_t launch_jagged_sessionize(const JaggedSessionizeParams& params, cudaStream_t stream) {
  const Grid grid{num_session_ctas(params.offsets.total)};
  cudaError_t error = rows::with_row_type(params.type, [&](auto element) {
    return launch<mark_starts<rows::Compared<decltype(element)>>>(params, grid, kScanThreads, 0,
                                                                  stream, nullptr);
  });
  if (error != cudaSuccess) return error;
  error = launch<write_starts>(params, grid, kScanThreads, 0, stream, "cuda.jagged_sessionize");
  if (error != cudaSuccess) return error;
  const int64_t threads = params.offsets.num_seqs + 1;
  return launch<find_first_sessions>(params, {(threads + kScanThreads - 1) / kScanThreads},
                                     kScanThreads, 0, stream, nullptr);
}

}  // namespace jagged_cuda
