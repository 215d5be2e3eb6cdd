// Second kernel of jagged_index_select: z_k[i] = x_b[i] with b = chosen[k]. It goes through the rows of x: a
// row is read once for all of its copies, wherever these are in the result.
//
// Grid: x, a warp for each virtual tile of kTileRows rows of x (prim/jagged.cuh), which it finds while it waits
// for the first kernel. Each lane looks up one copy of the tile's sequence, 32 at a time, and rows are
// written to one copy after another; rows behind the last copy become zeros.
//
// Lanes are beside each other along a row, in units of up to 16 bytes; what they leave over of the warp takes
// the next rows. No shared memory, no barriers.
#pragma once

#include "cuda/kernels/copies/copies.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::copies {

constexpr int kWriteCtas = 8;      // per SM, that the registers must leave room for
constexpr int kNarrowBytes = 128;  // rows of so many: tiles twice as high

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

}  // namespace jagged_cuda::copies
