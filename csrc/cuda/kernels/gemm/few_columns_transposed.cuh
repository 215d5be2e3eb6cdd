// jagged_jagged_bmm with 8 columns, in 16 bit: z_b = x_b^T y_b, x_b [L, D], y_b [L, 8], both with stride
// 1 along their columns, D a multiple of 64. It is a stream of x.
//
// Computed as z_b^T = y_b^T x_b, in which the 8 columns of y are half of the rows of a product. Grid: x,
// one CTA for each sequence; y, 256 columns of x. Of 8 warps kGroups have 64 columns each, and those of the
// same columns take 32 rows in turn.
//
//     for 32 rows:   rX = x[rows, 64 columns];   rY = y[rows, :];   sum += rY^T rX
//     sum the warps of the same columns in order;   store z
//
// x goes from global memory to registers, 16 bytes in each load: lane (g, t) has columns 8 g to 8 g + 7 of
// rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, so that two loads give it the pair of rows of each of its columns, of
// which the j-th is column g of product j.
//
// Shared memory: the sums of all warps. Barriers: one, between writing and reading them.
//
// The sum runs over rows in an order that only the sequence's length decides: deterministic, and alike in
// any batch. A sequence without rows gives zeros; rows behind its last one are not loaded.
#pragma once

#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/jagged_jagged_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {

template <typename Element_, int kGroups_>
struct FewColumnsTransposedConfig {
  using Element = Element_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kTurns = kWarps / kGroups;
  static constexpr int kColumns = 8, kGroupRows = 64;  // of z
  static constexpr int kRows = kGroupRows * kGroups;   // of z in a CTA
  static constexpr int kSteps = 1;  // of 16 rows of x, whose loads start together
  static constexpr int kLine = kRows + 4;
  static constexpr int kMinCtas = 3;
  static constexpr PathName kPath =
      PathName("cuda.jagged_jagged_bmm.few_columns.") + kElementName<Element>;
};

inline bool is_few_columns(const JaggedJaggedBmmParams& params) {
  constexpr int64_t kMaxSequences = int64_t{1} << 30, kMaxRows = 65535 * 64;
  return params.columns == 8 && params.rows % 64 == 0 && params.rows > 0 &&
         params.rows <= kMaxRows && params.x_vectors && is_16_bit(params.type) &&
         params.offsets.num_seqs < kMaxSequences;
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_few_columns(
    const __grid_constant__ JaggedJaggedBmmParams params) {
  using Element = typename Config::Element;
  constexpr int kSteps = Config::kSteps, kColumns = Config::kColumns, kTurns = Config::kTurns;
  constexpr int kStepRows = 16 * kSteps;
  __shared__ alignas(16) float sSums[kTurns][kColumns][Config::kLine];
  const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  const int warp = threadIdx.x / 32, group = warp % Config::kGroups, turn = warp / Config::kGroups;
  const int64_t seq = blockIdx.x;
  const RowRange range = sequence_rows(params.offsets, seq);
  const int64_t first = int64_t{blockIdx.y} * Config::kRows;  // column of x
  const int64_t begin = turn * kStepRows + 2 * quad_lane;
  const Element* gX = static_cast<const Element*>(params.x) +
                      (range.begin + begin) * params.x_stride + first + group * Config::kGroupRows +
                      quad * 8;
  const unsigned short* gY =
      static_cast<const unsigned short*>(params.y) + (range.begin + begin) * params.y_stride + quad;

  float sum[8][4] = {};
  RoundedSum<8> rounded;
  int since = 0;  // rows in `sum`
#pragma unroll 1
  for (int64_t left = range.len - begin; left > -2 * quad_lane; left -= kTurns * kStepRows) {
    uint4 rX[kSteps][4];
    uint32_t rY[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * step + i % 2 + i / 2 * 8;
        const bool exists = row < left;
        rX[step][i] = ptx::ld_global_nc_16(gX + row * params.x_stride, exists);
        rY[step][i] = exists ? __ldg(gY + row * params.y_stride) : 0;
      }
    }
    gX += kTurns * kStepRows * params.x_stride;
    gY += kTurns * kStepRows * params.y_stride;
    if (since == kSumDepth) {
      rounded.add(sum);
      since = 0;
    }
    since += kStepRows;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t a[4] = {rY[step][0] | rY[step][1] << 16, 0, rY[step][2] | rY[step][3] << 16,
                             0};
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4& row = rX[step][i];
        words[i][0] = row.x, words[i][1] = row.y, words[i][2] = row.z, words[i][3] = row.w;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t halves = j % 2 == 0 ? 0x5410 : 0x7632;  // both low halves, or both high ones
        ptx::mma_m16n8k16<Element>(sum[j], a, __byte_perm(words[0][j / 2], words[1][j / 2], halves),
                                   __byte_perm(words[2][j / 2], words[3][j / 2], halves));
      }
    }
  }
  rounded.finish(sum);
  // Sum i of product j has column lane / 4 of z and row 8 (2 (lane % 4) + i) + j of the group's.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      *reinterpret_cast<float4*>(
          &sSums[turn][quad][group * Config::kGroupRows + 8 * (2 * quad_lane + i) + j]) =
          make_float4(sum[j][i], sum[j + 1][i], sum[j + 2][i], sum[j + 3][i]);
    }
  }
  __syncthreads();  // the sums are there
  const int row = threadIdx.x;
  if (row >= Config::kRows || first + row >= params.rows) return;
  float z[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    z[n] = sSums[0][n][row];
#pragma unroll
    for (int other = 1; other < kTurns; ++other) z[n] += sSums[other][n][row];
  }
  ptx::st_global_16(
      static_cast<Element*>(params.out) + (seq * params.rows + first + row) * kColumns,
      make_uint4(pack<Element>(z[0], z[1]), pack<Element>(z[2], z[3]), pack<Element>(z[4], z[5]),
                 pack<Element>(z[6], z[7])));
}

template <typename Config>
cudaError_t launch_few_columns(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  return launch<jagged_jagged_bmm_few_columns<Config>>(
      params, {params.offsets.num_seqs, params.rows / Config::kRows}, Config::kThreads, 0, stream,
      Config::kPath);
}

// As many columns of x in a CTA as divide D.
inline cudaError_t launch_few_columns(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  const auto with_groups = [&](auto element) {
    using Element = decltype(element);
    if (params.rows % 256 == 0) {
      return launch_few_columns<FewColumnsTransposedConfig<Element, 4>>(params, stream);
    }
    if (params.rows % 128 == 0) {
      return launch_few_columns<FewColumnsTransposedConfig<Element, 2>>(params, stream);
    }
    return launch_few_columns<FewColumnsTransposedConfig<Element, 1>>(params, stream);
  };
  return params.type == ElementType::kBf16 ? with_groups(__nv_bfloat16{}) : with_groups(__half{});
}

}  // namespace jagged_cuda::gemm
