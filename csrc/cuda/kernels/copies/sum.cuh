// Second kernel of jagged_index_select's backward pass: dx_b[i] = sum over the copies k of sequence b, in the
// order of k, of dz_k[i].
//
// Grid: x, a warp for each virtual tile, found by the first kernel (find_tiles.cuh), or, behind a sort, by the
// warp, of kCopyRows rows. A row with one copy is copied; of more they are added in pairs, one copy after
// another: sums run in f32 (f64 of f64), in an order that depends on nothing else. A sequence without
// copies, and rows outside every sequence, give zeros.
//
// Lanes are beside each other along a row, in vectors of 16 bytes, or elements where alignment forbids them;
// what they leave over of the warp takes the next rows. No shared memory, no barriers.
#pragma once

#include "cuda/kernels/copies/copies.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::copies {

constexpr int kPairItems = kItems / 2;  // rows of two copies that a lane has in flight
constexpr int kSumCtas = 8;             // per SM, that the registers must leave room for

struct SumCopiesLaunch {
  SumCopiesParams params;
  int lanes_log2;
  int64_t tiles;
};

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

}  // namespace jagged_cuda::copies
