// Sums over the rows of each sequence, f32 (f64 of f64), and means.
//
//   z[b, c] = sum_i x_b[i, c]   (/ L)
//
// First kernel. Grid: x, a warp for each virtual tile of kSumTileRows rows (prim/jagged.cuh); y,
// groups of up to 32 vectors of 16 bytes (or elements, where alignment forbids more) beside each
// other. Lanes that a row leaves over take the next rows; theirs are added by shuffles. A sequence
// of one tile is finished. Of a longer one, each tile leaves its sums in a row of `partial`: tile j
// of the sequence that begins at row r in row r / (kSumTileRows / 2) + j, which no other long
// sequence uses, since one of more than kSumTileRows rows ends at least as many half tiles further
// as it has tiles.
//
// Second kernel, for the longer ones: a warp for each sequence of at most kWarpTiles tiles, the CTA
// for any other, adds its rows of `partial`.
//
// Which rows are added in which order depends on a sequence's own length alone: deterministic, and
// alike in any batch.
//
// Shared memory: the sums of 8 warps for 32 columns in the second kernel (2,048 bytes), between two
// barriers: one publishes them, one keeps them until all have read. An empty sequence gives zeros:
// it has a virtual tile too. Rows outside every sequence are not read.
#pragma once

#include "cuda/kernels/jagged_sum.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"

#include <algorithm>

namespace jagged_cuda::rows {

constexpr int kSumThreads = 128;
constexpr int kSumWarps = kSumThreads / 32;
constexpr int kSumCtas = 4;   // per SM, that the registers must leave room for
constexpr int kSumItems = 8;  // vectors that a lane has in flight
constexpr int kPartialThreads = 256;
constexpr int kPartialWarps = kPartialThreads / 32;
constexpr int kWarpTiles = 64;

struct SumLaunch {
  JaggedSumParams params;
  int lanes_log2;  // vectors of a row beside each other
  int64_t groups;  // of columns
  int64_t tiles;
};

__device__ __forceinline__ int64_t first_slot(int64_t begin) { return begin / (kSumTileRows / 2); }

// Adds value of all lanes of the warp that hold the same column.
template <int kVector, typename S>
__device__ __forceinline__ void add_lanes(S (&value)[kVector], int lanes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < lanes) break;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      value[e] += __shfl_xor_sync(0xffffffffu, value[e], offset);
    }
  }
}

template <typename Element, int kVector>
__global__ __launch_bounds__(kSumThreads, kSumCtas) void sum_tiles_kernel(
    const __grid_constant__ SumLaunch launch) {
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;
  const JaggedSumParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kSumWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kSumTileRows>(params.offsets, index);
  // An empty sequence's tile has row 0.
  if (tile.seq < 0 || (tile.row > 0 && tile.row >= tile.rows.len)) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kSumTileRows ? static_cast<int>(left) : kSumTileRows;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  for (int64_t group = blockIdx.y; group < launch.groups; group += gridDim.y) {
    const int64_t column = ((group << launch.lanes_log2) + (lane & (lanes - 1))) * kVector;
    const bool exists = column < params.columns;
    const int own_rows = exists ? rows : 0;
    const Element* gX = static_cast<const Element*>(params.x) +
                        (tile.rows.begin + tile.row) * params.x_stride + column;
    S sum[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll 1
    for (int row = first; row < own_rows; row += kSumItems * step) {
      Loaded rX[kSumItems];
#pragma unroll
      for (int i = 0; i < kSumItems; ++i) {
        if (row + i * step < own_rows) {
          rX[i] = *reinterpret_cast<const Loaded*>(gX + (row + i * step) * params.x_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kSumItems; ++i) {
        if (row + i * step < own_rows) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) sum[e] += to_sum(rX[i].elems[e]);
        }
      }
    }
    add_lanes(sum, lanes);
    if (lane >= lanes || !exists) continue;
    if (tile.rows.len > kSumTileRows) {
      const int64_t slot = first_slot(tile.rows.begin) + tile.row / kSumTileRows;
      S* gPartial = static_cast<S*>(params.partial) + slot * params.columns + column;
#pragma unroll
      for (int e = 0; e < kVector; ++e) gPartial[e] = sum[e];
    } else {
      const S divisor = params.mean && rows > 0 ? static_cast<S>(rows) : S(1);
      Loaded result;
#pragma unroll
      for (int e = 0; e < kVector; ++e) result.elems[e] = from_sum<Element>(sum[e] / divisor);
      Element* gOut = static_cast<Element*>(params.out) + tile.seq * params.columns + column;
      *reinterpret_cast<Loaded*>(gOut) = result;
    }
  }
}

// One column of the partial sums of a sequence: rows first, first + step, ... of `tiles`.
template <typename S>
__device__ __forceinline__ S add_partial(const S* gPartial, int64_t tiles, int64_t columns,
                                         int64_t first, int64_t step) {
  S sum = S(0);
#pragma unroll 1
  for (int64_t row = first; row < tiles; row += kSumItems * step) {
    S rPartial[kSumItems];
#pragma unroll
    for (int i = 0; i < kSumItems; ++i) {
      const int64_t tile = row + i * step;
      rPartial[i] = tile < tiles ? gPartial[tile * columns] : S(0);
    }
#pragma unroll
    for (int i = 0; i < kSumItems; ++i) sum += rPartial[i];
  }
  return sum;
}

template <typename Element>
__global__ __launch_bounds__(kPartialThreads) void sum_partial_kernel(
    const __grid_constant__ SumLaunch launch) {
  using S = Sum<Element>;
  __shared__ S sSum[kPartialWarps][32];
  const JaggedSumParams& params = launch.params;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  for (int i = 0; i < kPartialWarps; ++i) {
    const int64_t seq = blockIdx.x * int64_t{kPartialWarps} + i;
    if (seq >= params.offsets.num_seqs) break;
    const RowRange range = sequence_rows(params.offsets, seq);
    const int64_t tiles = (range.len + kSumTileRows - 1) / kSumTileRows;
    const bool in_cta = tiles > kWarpTiles;
    if (tiles < 2 || (!in_cta && warp != i)) continue;
    const S divisor = params.mean ? static_cast<S>(range.len) : S(1);
    const S* gFirst =
        static_cast<const S*>(params.partial) + first_slot(range.begin) * params.columns;
    for (int64_t group = blockIdx.y; group < launch.groups; group += gridDim.y) {
      const int64_t column = (group << launch.lanes_log2) + (lane & (lanes - 1));
      const bool exists = column < params.columns;
      const int64_t own_tiles = exists ? tiles : 0;
      S sum[1];
      sum[0] = in_cta ? add_partial(gFirst + column, own_tiles, params.columns,
                                    int64_t{warp} * step + first, int64_t{kPartialWarps} * step)
                      : add_partial(gFirst + column, own_tiles, params.columns, first, step);
      add_lanes(sum, lanes);
      if (in_cta) {
        sSum[warp][lane] = sum[0];
        __syncthreads();  // the sums of all warps are there
        sum[0] = S(0);
#pragma unroll
        for (int w = 0; w < kPartialWarps; ++w) sum[0] += sSum[w][lane];
        __syncthreads();  // all have read them
      }
      if (lane < lanes && exists && warp == i) {
        static_cast<Element*>(params.out)[seq * params.columns + column] =
            from_sum<Element>(sum[0] / divisor);
      }
    }
  }
}

template <typename Element, int kVector>
cudaError_t launch_sum_vector(const JaggedSumParams& params, cudaStream_t stream) {
  const auto arguments = [&](int64_t vectors) {
    int lanes_log2 = 0;
    while (lanes_log2 < 5 && (int64_t{1} << lanes_log2) < vectors) ++lanes_log2;
    const int64_t groups = (vectors + (int64_t{1} << lanes_log2) - 1) >> lanes_log2;
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kSumTileRows);
    return SumLaunch{params, lanes_log2, groups, tiles};
  };
  const auto grid = [&](int64_t items, int items_each, int64_t groups) {
    return Grid{(items + items_each - 1) / items_each, std::min(groups, Grid::kMaxY)};
  };
  const SumLaunch sums = arguments((params.columns + kVector - 1) / kVector);
  const cudaError_t error = launch<sum_tiles_kernel<Element, kVector>>(
      sums, grid(sums.tiles, kSumWarps, sums.groups), kSumThreads, 0, stream,
      params.mean ? "cuda.jagged_mean" : "cuda.jagged_sum");
  if (error != cudaSuccess || params.partial == nullptr) return error;
  const SumLaunch partial = arguments(params.columns);
  return launch<sum_partial_kernel<Element>>(
      partial, grid(params.offsets.num_seqs, kPartialWarps, partial.groups), kPartialThreads, 0,
      stream, nullptr);
}

}  // namespace jagged_cuda::rows
