// jagged_to_padded:
//
//   z[b, i] = x[offsets[b] + i] for i < L, else fill
//
// Grid: x, a warp for each kRows rows of the result, taken as [B * M] rows: each is divided into
// its sequence and its row. Lanes are beside each other along a row, in units of up to 16 bytes;
// what they leave over of the warp takes the next rows. No shared memory, no barriers, and nothing
// ragged but the last rows of the result.
#include "cuda/kernels/jagged_to_padded.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

struct JaggedToPaddedLaunch {
  JaggedToPaddedParams params;
  int lanes_log2;
};

template <typename Unit>
__device__ __forceinline__ Unit fill_unit(uint64_t fill) {
  const uint32_t low = static_cast<uint32_t>(fill), high = static_cast<uint32_t>(fill >> 32);
  if constexpr (sizeof(Unit) == 16) {
    return make_uint4(low, high, low, high);
  } else if constexpr (sizeof(Unit) == 8) {
    return make_uint2(low, high);
  } else {
    return static_cast<Unit>(low);
  }
}

template <typename Unit>
__global__ __launch_bounds__(kThreads) void jagged_to_padded_kernel(
    const __grid_constant__ JaggedToPaddedLaunch launch) {
  const JaggedToPaddedParams& params = launch.params;
  const int64_t max_len = params.max_len, total_rows = params.offsets.num_seqs * max_len;
  const int64_t begin = (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * kRows;
  if (begin >= total_rows) return;
  const int rows = total_rows - begin < kRows ? static_cast<int>(total_rows - begin) : kRows;
  const int64_t first_seq = begin / max_len, first_row = begin - first_seq * max_len;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const Unit fill = fill_unit<Unit>(params.fill);
  const Unit* gX = static_cast<const Unit*>(params.x);
  Unit* gOut = static_cast<Unit*>(params.out) + begin * params.row_units;
  for (int64_t unit = lane & (lanes - 1); unit < params.row_units; unit += lanes) {
#pragma unroll 1
    for (int i = first; i < rows; i += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        rX[item] = fill;
        if (i + item * step >= rows) continue;
        int64_t seq = first_seq, row = first_row + i + item * step;
        if (row >= max_len) {  // with few rows per sequence, the warp holds several
          const int64_t passed =
              max_len >= kRows ? 1 : static_cast<int>(row) / static_cast<int>(max_len);
          seq += passed;
          row -= passed * max_len;
        }
        const RowRange range = sequence_rows(params.offsets, seq);
        if (row < range.len) {
          rX[item] = __ldg(gX + (range.begin + row) * params.x_stride + unit);
        }
      }
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (i + item * step < rows) gOut[(i + item * step) * params.row_units + unit] = rX[item];
      }
    }
  }
}

}  // namespace

cudaError_t launch_jagged_to_padded(const JaggedToPaddedParams& params, cudaStream_t stream) {
  const JaggedToPaddedLaunch arguments{params, rows::lanes_log2(params.row_units)};
  constexpr int64_t kCtaRows = int64_t{kWarps} * kRows;
  const int64_t ctas = (params.offsets.num_seqs * params.max_len + kCtaRows - 1) / kCtaRows;
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    return launch<jagged_to_padded_kernel<decltype(unit)>>(arguments, {ctas}, kThreads, 0, stream,
                                                           "cuda.jagged_to_padded");
  });
}

}  // namespace jagged_cuda
