// Plans that take ranges of rows, one after another: jagged_slice and jagged_index_select.
//
//   offsets'[i] = sum of len over the ranges before i      index[offsets'[i] + j] = first_i + j
//
// Up to three kernels. With more than one tile of kRangeTile ranges, the first sums the rows of each
// tile. The second, a CTA per tile, adds the sums of the tiles before its own and scans its ranges,
// which gives the offsets: no atomics, and no CTA waits for another. The third has a warp for each
// kFillRows rows of the result, whose lanes find the ranges of four beside each other
// (rows/places.cuh).
//
// Shared memory: one scan each. Ranges of no rows have an offset, and nothing in the index. Rows
// behind the last range take none, -1. Wrong offsets are clamped, as everywhere. Each kernel may start
// while the one before it drains, and waits for it before anything else.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/rows/places.cuh"
#include "cuda/kernels/rows/ranges.h"
#include "cuda/kernels/rows/scan.cuh"

namespace jagged_cuda::rows {

constexpr int kThreadRanges = kRangeTile / kScanThreads;
constexpr int kLaneRows = 4;
constexpr int kFillRows = 32 * kLaneRows;  // of a warp
constexpr int kFillThreads = 128;

// given[i], int64 if `wide`, else int32; `otherwise` if it is null.
__device__ __forceinline__ int64_t load_number(const void* given, bool wide, int64_t i,
                                               int64_t otherwise) {
  if (given == nullptr) return otherwise;
  return wide ? __ldg(static_cast<const long long*>(given) + i)
              : static_cast<int64_t>(__ldg(static_cast<const int*>(given) + i));
}

// The rows of range i in the source; none past the last range.
__device__ __forceinline__ RowRange source_range(const RangesParams& params, int64_t i) {
  const OffsetsView& offsets = params.offsets;
  if (i >= params.num_ranges) return {0, 0};
  const int64_t seq = params.chosen == nullptr ? i : __ldg(params.chosen + i);
  if (seq < 0 || seq >= offsets.num_seqs) return {0, 0};
  const RowRange rows = sequence_rows(offsets, seq);
  const int64_t begin = load_number(params.begin, offsets.wide, i, 0);
  const int64_t length = load_number(params.length, offsets.wide, i, rows.len);
  const auto cut = [](int64_t value, int64_t most) {
    return value < 0 ? 0 : value > most ? most : value;
  };
  const int64_t first = cut(cut(begin, rows.len) + cut(params.skip, rows.len), rows.len);
  const int64_t len = cut(cut(length, rows.len - first), params.most);
  return {rows.begin + (params.from_end ? rows.len - first - len : first), len};
}

static __global__ __launch_bounds__(kScanThreads) void sum_ranges_kernel(
    const RangesParams params) {
  ptx::griddepcontrol_launch_dependents();
  __shared__ ScanStorage<int64_t> sScan;
  int64_t own = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadRanges; ++i) {
    own +=
        source_range(params, blockIdx.x * int64_t{kRangeTile} + i * kScanThreads + threadIdx.x).len;
  }
  sum_before(own, sScan, sum);
  if (threadIdx.x == 0) params.tile_sums[blockIdx.x] = sum;
}

static __global__ __launch_bounds__(kScanThreads) void scan_ranges_kernel(
    const RangesParams params) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  __shared__ ScanStorage<int64_t> sTiles, sScan;
  const int64_t tile = blockIdx.x;
  int64_t own = 0, before = 0, sum = 0;
  for (int64_t other = threadIdx.x; other < tile; other += kScanThreads) {
    own += __ldg(params.tile_sums + other);
  }
  sum_before(own, sTiles, before);
  const int64_t first = tile * kRangeTile + threadIdx.x * kThreadRanges;
  int64_t rLen[kThreadRanges];
  own = 0;
#pragma unroll
  for (int i = 0; i < kThreadRanges; ++i) {
    rLen[i] = source_range(params, first + i).len;
    own += rLen[i];
  }
  int64_t place = before + sum_before(own, sScan, sum);
#pragma unroll
  for (int i = 0; i < kThreadRanges; ++i) {
    if (first + i <= params.num_ranges) {
      const int64_t cut = place < params.capacity ? place : params.capacity;
      if (params.offsets.wide) {
        static_cast<int64_t*>(params.planned)[first + i] = cut;
      } else {
        static_cast<int*>(params.planned)[first + i] = static_cast<int>(cut);
      }
      if (params.uncut != nullptr) params.uncut[first + i] = place;
    }
    place += rLen[i];
  }
}

static __global__ __launch_bounds__(kFillThreads) void fill_index_kernel(
    const RangesParams params) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t begin = (blockIdx.x * int64_t{kFillThreads / 32} + threadIdx.x / 32) * kFillRows;
  if (begin >= params.total) return;
  const OffsetsView planned{params.planned, params.num_ranges, params.total, params.offsets.wide};
  Place places[kLaneRows];
  find_places(planned, begin, places);
  const int64_t first = begin + threadIdx.x % 32 * kLaneRows;
  int64_t rows[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const auto [range, row] = places[i];
    rows[i] = range < 0 ? -1 : source_range(params, range).begin + row;
  }
  if (first + kLaneRows <= params.total) {
    auto* gIndex = reinterpret_cast<longlong2*>(params.index + first);
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 2) gIndex[i / 2] = make_longlong2(rows[i], rows[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (first + i < params.total) params.index[first + i] = rows[i];
    }
  }
}

inline cudaError_t launch_ranges(const RangesParams& params, cudaStream_t stream,
                                 const char* path) {
  const Grid tiles{range_tiles(params.num_ranges)};
  if (params.tile_sums != nullptr) {
    const cudaError_t error =
        launch<sum_ranges_kernel>(params, tiles, kScanThreads, 0, stream, nullptr);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error =
      launch_dependent<scan_ranges_kernel>(params, tiles, kScanThreads, 0, stream, path);
  if (error != cudaSuccess || params.total == 0) return error;
  constexpr int64_t kCtaRows = int64_t{kFillThreads} / 32 * kFillRows;
  return launch_dependent<fill_index_kernel>(params, {(params.total + kCtaRows - 1) / kCtaRows},
                                             kFillThreads, 0, stream, path);
}

}  // namespace jagged_cuda::rows
