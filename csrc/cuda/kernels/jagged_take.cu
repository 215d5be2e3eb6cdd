// jagged_take:
//
//   z[i] = x[index[i]], 0 where index[i] is no row
//
// Grid: x, a warp for each kRows rows of the result. Each lane finds where one of these rows is; the
// warp then copies them, lanes beside each other along a row, in units of up to 16 bytes; what a row
// leaves over of the warp takes the next rows. No shared memory, no barriers, and nothing ragged but
// the last rows of the result.
//
// The inverse: inverse[index[i]] = i, -1 for rows that are not taken. Grid: x, a thread for each row
// of the index. No two write the same place if no row is taken twice.
#include "cuda/kernels/jagged_take.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

constexpr int kInvertThreads = 256;

struct JaggedTakeLaunch {
  JaggedTakeParams params;
  int lanes_log2;
};

// Where the row with number `row` among those of all sources is; null for none.
template <typename Unit>
__device__ __forceinline__ const Unit* find_row(const JaggedTakeParams& params, int64_t row) {
  if (row < 0 || row >= params.sources[kTakeSources - 1].end) return nullptr;
  int64_t first = 0;
#pragma unroll
  for (int i = 0; i < kTakeSources - 1; ++i) {
    const TakeSource& source = params.sources[i];
    if (row < source.end) {
      return static_cast<const Unit*>(source.data) + (row - first) * source.stride;
    }
    first = source.end;
  }
  const TakeSource& last = params.sources[kTakeSources - 1];
  return static_cast<const Unit*>(last.data) + (row - first) * last.stride;
}

template <typename Unit>
__global__ __launch_bounds__(kThreads) void jagged_take_kernel(
    const __grid_constant__ JaggedTakeLaunch launch) {
  static_assert(kRows == 32, "each lane finds one row");
  const JaggedTakeParams& params = launch.params;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  if (begin >= params.rows) return;
  const int rows = params.rows - begin < kRows ? static_cast<int>(params.rows - begin) : kRows;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const auto found = reinterpret_cast<unsigned long long>(
      find_row<Unit>(params, lane < rows ? __ldg(params.index + begin + lane) : -1));
  Unit* gOut = static_cast<Unit*>(params.out) + begin * params.row_units;
  // All lanes stay in both loops, since each hands on what it has found.
  for (int64_t first_unit = 0; first_unit < params.row_units; first_unit += lanes) {
    const int64_t unit = first_unit + (lane & (lanes - 1));
    const bool exists = unit < params.row_units;
#pragma unroll 1
    for (int first_row = 0; first_row < rows; first_row += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first_row + first + i * step;
        const auto* gX =
            reinterpret_cast<const Unit*>(__shfl_sync(0xffffffffu, found, row % kRows));
        rX[i] = Unit{};
        if (exists && row < rows && gX != nullptr) rX[i] = __ldg(gX + unit);
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first_row + first + i * step;
        if (exists && row < rows) gOut[row * params.row_units + unit] = rX[i];
      }
    }
  }
}

__global__ __launch_bounds__(kInvertThreads) void invert_kernel(const InvertParams params) {
  const int64_t row = blockIdx.x * int64_t{kInvertThreads} + threadIdx.x;
  if (row >= params.rows) return;
  const int64_t place = __ldg(params.index + row);
  if (place >= 0 && place < params.total) params.inverse[place] = row;
}

}  // namespace

cudaError_t launch_jagged_take(const JaggedTakeParams& params, cudaStream_t stream) {
  const JaggedTakeLaunch arguments{params, rows::lanes_log2(params.row_units)};
  constexpr int64_t kCtaRows = int64_t{kWarps} * kRows;
  const Grid grid{(params.rows + kCtaRows - 1) / kCtaRows};
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    return launch<jagged_take_kernel<decltype(unit)>>(arguments, grid, kThreads, 0, stream,
                                                      "cuda.jagged_take");
  });
}

cudaError_t launch_jagged_take_backward(const InvertParams& params, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(params.total) * sizeof(int64_t);
  const cudaError_t error = cudaMemsetAsync(params.inverse, 0xff, bytes, stream);  // -1
  if (error != cudaSuccess || params.rows == 0) return error;
  return launch<invert_kernel>(params, {(params.rows + kInvertThreads - 1) / kInvertThreads},
                               kInvertThreads, 0, stream, "cuda.jagged_take_backward");
}

}  // namespace jagged_cuda
