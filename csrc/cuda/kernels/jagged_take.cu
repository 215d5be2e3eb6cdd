// jagged_take:
//
//   z[i] = x[index[i]], 0 where index[i] is no row
//
// Grid: x, a warp for each kRows rows of the result. Each lane finds where one of these rows is; the
// warp then copies them in units of up to 16 bytes (rows/move.cuh). No shared memory, no barriers, and
// nothing ragged but the last rows of the result. It may start while the kernel that writes the index
// drains, and waits for that one first.
//
// The inverse: inverse[index[i]] = i, -1 for rows that are not taken. Grid: x, a thread for each row
// of the index. No two write the same place if no row is taken twice.
#include "cuda/kernels/jagged_take.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/rows/move.cuh"

namespace jagged_cuda {
namespace {

using rows::kRows;
using rows::kThreads;
using rows::kWarps;

constexpr int kInvertThreads = 256;

struct JaggedTakeLaunch {
  JaggedTakeParams params;
  int lanes_log2;
};

template <typename Unit>
__global__ __launch_bounds__(kThreads) void jagged_take_kernel(
    const __grid_constant__ JaggedTakeLaunch launch) {
  ptx::griddepcontrol_wait();
  const JaggedTakeParams& params = launch.params;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  if (begin >= params.rows) return;
  const int rows = params.rows - begin < kRows ? static_cast<int>(params.rows - begin) : kRows;
  const int lane = threadIdx.x % 32;
  const int64_t number = lane < rows ? __ldg(params.index + begin + lane) : -1;
  const Unit* found = number < 0 || number >= params.total
                          ? nullptr
                          : static_cast<const Unit*>(params.x) + number * params.stride;
  rows::copy_found_rows(found, static_cast<Unit*>(params.out) + begin * params.row_units, rows,
                        params.row_units, launch.lanes_log2);
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
    return launch_dependent<jagged_take_kernel<decltype(unit)>>(arguments, grid, kThreads, 0,
                                                                stream, "cuda.jagged_take");
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
