// matrix_offsets:
//
//   z[b] = sum of max(Lx, 0) max(Ly, 0) over the sequences before b
//
// Grid: x, a CTA for each tile of kMatrixOffsetsTile sequences. It adds up its products: each thread
// kScanItems in a row, then the threads of a warp by shuffles, then the warps in shared memory (kScanWarps
// sums of 8 bytes). With several tiles a second kernel adds the sums of the tiles before, which each
// of its CTAs adds up by itself.
//
// Barriers: the warps' sums are there.
#include "cuda/kernels/matrix_offsets.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda {
namespace {

constexpr int kScanThreads = 1024;
constexpr int kScanWarps = kScanThreads / 32;
constexpr int kScanItems = kMatrixOffsetsTile / kScanThreads;
constexpr unsigned kScanLanes = 0xffffffffu;

template <typename Offset>
__device__ __forceinline__ uint64_t length(const void* offsets, int64_t seq) {
  const auto* gOffsets = static_cast<const Offset*>(offsets);
  const int64_t begin = __ldg(gOffsets + seq), end = __ldg(gOffsets + seq + 1);
  return end > begin ? static_cast<uint64_t>(end) - static_cast<uint64_t>(begin) : 0;
}

// Sums are unsigned: with wrong offsets they may pass 2^63.
__device__ __forceinline__ uint64_t inclusive_sum_of_lanes(uint64_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_up_sync(kScanLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

template <typename Offset>
__device__ __forceinline__ void add_up_tile(const MatrixOffsetsParams& params,
                                            uint64_t (&sWarps)[kScanWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = blockIdx.x * int64_t{kMatrixOffsetsTile} + threadIdx.x * kScanItems;
  const bool square = params.offsets == params.y_offsets;
  uint64_t sums[kScanItems], sum = 0;
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    uint64_t product = 0;
    if (first + i < params.num_seqs) {
      const uint64_t rows = length<Offset>(params.offsets, first + i);
      product = rows * (square ? rows : length<Offset>(params.y_offsets, first + i));
    }
    sums[i] = sum += product;
  }
  const uint64_t end = inclusive_sum_of_lanes(sum);
  if (lane == 31) sWarps[warp] = end;
  __syncthreads();  // the warps' sums are there
  const uint64_t ends = inclusive_sum_of_lanes(sWarps[lane]);
  uint64_t begin = __shfl_sync(kScanLanes, ends, warp > 0 ? warp - 1 : 0);
  begin = (warp > 0 ? begin : 0) + end - sum;
  if (blockIdx.x == 0 && threadIdx.x == 0) params.out[0] = 0;
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    if (first + i < params.num_seqs) {
      params.out[first + i + 1] = static_cast<int64_t>(begin + sums[i]);
    }
  }
  if (params.tile_sums != nullptr && threadIdx.x == 0) {
    // The sum of all warps, of which the last tile's is never read.
    uint64_t all = 0;
#pragma unroll
    for (int w = 0; w < kScanWarps; ++w) all += sWarps[w];
    if (first + kMatrixOffsetsTile <= params.num_seqs) {
      params.tile_sums[blockIdx.x] = static_cast<int64_t>(all);
    }
  }
}

__global__ __launch_bounds__(kScanThreads) void add_up_kernel(
    const __grid_constant__ MatrixOffsetsParams params) {
  static_assert(kScanWarps == 32, "a warp adds up the sums of all");
  __shared__ uint64_t sWarps[kScanWarps];
  if (params.wide) {
    add_up_tile<long long>(params, sWarps);
  } else {
    add_up_tile<int>(params, sWarps);
  }
}

__global__ __launch_bounds__(kScanThreads) void add_tiles_before_kernel(
    const __grid_constant__ MatrixOffsetsParams params) {
  __shared__ uint64_t sWarps[kScanWarps];
  ptx::griddepcontrol_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t tile = blockIdx.x + int64_t{1};
  uint64_t sum = 0;
  for (int64_t i = threadIdx.x; i < tile; i += kScanThreads) {
    sum += static_cast<uint64_t>(params.tile_sums[i]);
  }
  const uint64_t of_warp = inclusive_sum_of_lanes(sum);
  if (lane == 31) sWarps[warp] = of_warp;
  __syncthreads();  // the warps' sums are there
  const uint64_t before = __shfl_sync(kScanLanes, inclusive_sum_of_lanes(sWarps[lane]), 31);
  const int64_t first = tile * kMatrixOffsetsTile;
#pragma unroll
  for (int i = 0; i < kScanItems; ++i) {
    const int64_t seq = first + i * kScanThreads + threadIdx.x;
    if (seq < params.num_seqs) params.out[seq + 1] += static_cast<int64_t>(before);
  }
}

}  // namespace

cudaError_t launch_matrix_offsets(const MatrixOffsetsParams& params, cudaStream_t stream) {
  const int64_t full = params.num_seqs == 0 ? 0 : (params.num_seqs - 1) / kMatrixOffsetsTile;
  const cudaError_t error =
      launch<add_up_kernel>(params, {full + 1}, kScanThreads, 0, stream, "cuda.matrix_offsets");
  if (error != cudaSuccess || full == 0) return error;
  return launch_dependent<add_tiles_before_kernel>(params, {full}, kScanThreads, 0, stream);
}

}  // namespace jagged_cuda
