// jagged_select: the rows t of the sequences with keep[t], in their order.
//
//   index[number of rows kept before t] = t      offsets'[b] = number of rows kept before offsets[b]
//
// Two kernels, both with a CTA for each tile of kSelectRows rows; a thread has kThreadRows of them.
// The first counts the rows that each tile keeps. The second adds the counts of the tiles before its
// own, which is a few loads per thread even for 10^8 rows, and then knows each row's place: no
// atomics, and no CTA waits for another. It also writes the offsets that lie in its rows, and fills
// its share of the rows behind the last one that is kept with -1.
//
// Shared memory of the second: the rows that are kept, one after another, so that they are stored
// side by side (8 KiB), a bit for each row with the count before each 16 (1.5 KiB), and scans.
// Barriers: within each scan; one publishes rows and bits. Offsets that are equal, of empty
// sequences, belong to the one tile that has their row; those at T to the last.
#include "cuda/kernels/jagged_select.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/scan.cuh"

namespace jagged_cuda {
namespace {

using rows::kScanThreads;
using rows::ScanStorage;
using rows::sum_before;

constexpr int kThreadRows = kSelectRows / kScanThreads;
static_assert(kThreadRows == 16, "a thread's rows are the bits of a 16-bit word, and one load");

// A bit for each of this thread's rows that is kept.
__device__ __forceinline__ uint32_t load_kept(const JaggedSelectParams& params, int64_t tile) {
  const OffsetsView& offsets = params.offsets;
  const int64_t begin = clamped_offset(offsets, 0);
  const int64_t end = clamped_offset(offsets, offsets.num_seqs);
  const int64_t first = tile * kSelectRows + threadIdx.x * kThreadRows;
  uint32_t kept = 0;
  if (first >= end || first + kThreadRows <= begin) return kept;
  const uint8_t* gKeep = params.keep + first;
  if (reinterpret_cast<uintptr_t>(gKeep) % kThreadRows == 0 &&
      first + kThreadRows <= offsets.total) {
    const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(gKeep));
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      kept |= (words[i / 4] >> (8 * (i % 4)) & 0xff ? 1u : 0u) << i;
    }
  } else {
    for (int i = 0; i < kThreadRows && first + i < offsets.total; ++i) {
      kept |= (__ldg(gKeep + i) ? 1u : 0u) << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    if (first + i < begin || first + i >= end) kept &= ~(1u << i);
  }
  return kept;
}

__global__ __launch_bounds__(kScanThreads) void count_kept_kernel(const JaggedSelectParams params) {
  __shared__ ScanStorage<int> sScan;
  int sum = 0;
  sum_before(__popc(load_kept(params, blockIdx.x)), sScan, sum);
  if (threadIdx.x == 0) params.counts[blockIdx.x] = sum;
}

// The first of offsets that is not below `row`; all lanes of a warp together.
__device__ __forceinline__ int64_t first_offset_from(const OffsetsView& offsets, int64_t row) {
  return find_segment(offsets,
                      [&](int64_t bound, int64_t index) { return index == 0 || bound < row; })
      .index;
}

struct SelectStorage {
  ScanStorage<int> scan;
  ScanStorage<int64_t> before, all;
  uint16_t kept_rows[kSelectRows];         // one after another
  uint16_t bits[kScanThreads];             // of each thread's rows
  uint16_t kept_before[kScanThreads + 1];  // each thread's rows
  int64_t first_offset, end_offset;        // of those in these rows
};

__device__ __forceinline__ void store_offset(const JaggedSelectParams& params, int64_t seq,
                                             int64_t value) {
  const int64_t cut = value < params.capacity ? value : params.capacity;
  if (params.offsets.wide) {
    static_cast<int64_t*>(params.planned)[seq] = cut;
  } else {
    static_cast<int*>(params.planned)[seq] = static_cast<int>(cut);
  }
  if (params.uncut != nullptr) params.uncut[seq] = value;
}

__global__ __launch_bounds__(kScanThreads) void select_kernel(const JaggedSelectParams params) {
  __shared__ SelectStorage storage;
  const int64_t tile = blockIdx.x, tiles = gridDim.x, first_row = tile * kSelectRows;
  const uint32_t kept = load_kept(params, tile);
  int kept_here = 0;
  int place = sum_before(__popc(kept), storage.scan, kept_here);
  int64_t own_before = 0, own_all = 0;
  for (int64_t other = threadIdx.x; other < tiles; other += kScanThreads) {
    const int count = __ldg(params.counts + other);
    own_all += count;
    if (other < tile) own_before += count;
  }
  int64_t before = 0, all = 0;
  sum_before(own_before, storage.before, before);
  sum_before(own_all, storage.all, all);

  storage.bits[threadIdx.x] = static_cast<uint16_t>(kept);
  storage.kept_before[threadIdx.x] = static_cast<uint16_t>(place);
  if (threadIdx.x == 0) storage.kept_before[kScanThreads] = static_cast<uint16_t>(kept_here);
  for (uint32_t left = kept; left != 0; left &= left - 1) {
    storage.kept_rows[place++] =
        static_cast<uint16_t>(threadIdx.x * kThreadRows + __ffs(static_cast<int>(left)) - 1);
  }
  if (threadIdx.x < 32) {
    const int64_t first = first_offset_from(params.offsets, first_row);
    const int64_t end = tile + 1 < tiles
                            ? first_offset_from(params.offsets, first_row + kSelectRows)
                            : params.offsets.num_seqs + 1;
    if (threadIdx.x == 0) {
      storage.first_offset = first;
      storage.end_offset = end;
    }
  }
  __syncthreads();  // rows, bits and the offsets' range are there

  for (int i = threadIdx.x; i < kept_here; i += kScanThreads) {
    if (before + i < params.capacity) params.index[before + i] = first_row + storage.kept_rows[i];
  }
  for (int64_t seq = storage.first_offset + threadIdx.x; seq < storage.end_offset;
       seq += kScanThreads) {
    const int64_t past = clamped_offset(params.offsets, seq) - first_row;
    const int row = past < 0 ? 0 : past > kSelectRows ? kSelectRows : static_cast<int>(past);
    const int word = row / kThreadRows;
    int here = storage.kept_before[word];
    if (row % kThreadRows != 0) {
      here += __popc(storage.bits[word] & ((1u << row % kThreadRows) - 1));
    }
    store_offset(params, seq, before + here);
  }
  // Rows of the result that take none.
  const int64_t used = all < params.capacity ? all : params.capacity;
  for (int64_t row = used + tile * kScanThreads + threadIdx.x; row < params.total;
       row += tiles * kScanThreads) {
    params.index[row] = -1;
  }
}

}  // namespace

cudaError_t launch_jagged_select(const JaggedSelectParams& params, cudaStream_t stream) {
  const Grid grid{select_tiles(params.offsets.total)};
  const cudaError_t error =
      launch<count_kept_kernel>(params, grid, kScanThreads, 0, stream, nullptr);
  if (error != cudaSuccess) return error;
  return launch<select_kernel>(params, grid, kScanThreads, 0, stream, "cuda.jagged_select");
}

}  // namespace jagged_cuda
