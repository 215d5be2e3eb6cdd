// array_jagged_bmm_jagged_out of f32 for short sequences
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda::gemm {
namespace {

template <typename Math_, bool kTranspose_, int kFragments_, int kBatch_, int kMinCtas_>
struct ShortConfig {
  using Math = Math_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kFragments = kFragments_;  // of 16 rows
  static constexpr int kRows = 16 * kFragments;
  static constexpr int kBatch = kBatch_;  // steps of K whose loads start together
  static constexpr int kStepK = 8, kColumns = 32;
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kMinCtas = kMinCtas_;
};

struct ShortParams {
  ArrayJaggedBmmJaggedOutParams product;
  int column_tiles;
  int max_rows;
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void array_jagged_bmm_jagged_out_f32_short(
    const __grid_constant__ ShortParams launch) {
  constexpr bool kTranspose = Config::kTranspose, kSplit = Config::Math::kCompensated;
  constexpr int kFragments = Config::kFragments, kBatch = Config::kBatch;
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  const int lane = threadIdx.x % 32, quad = lane / 4, own = lane % 4;
  const int64_t part = int64_t{blockIdx.x} * Config::kWarps + threadIdx.x / 32;
  const int64_t seq = part / launch.column_tiles;
  if (seq >= params.matrices.rows.num_seqs) return;
  const int first_column = static_cast<int>(part % launch.column_tiles) * Config::kColumns;
  const Matrix matrix = find_matrix(params.matrices, seq);
  if (matrix.rows.len > launch.max_rows || matrix.columns.len > launch.max_rows) return;
  const RowRange& out_rows = kTranspose ? matrix.columns : matrix.rows;
  const RowRange& summed = kTranspose ? matrix.rows : matrix.columns;
  const int rows = static_cast<int>(out_rows.len);
  const int depth = matrix.fits ? static_cast<int>(summed.len) : 0;
  const int pitch = static_cast<int>(matrix.columns.len);
  const int row_stride = kTranspose ? 1 : pitch, k_stride = kTranspose ? pitch : 1;
  const int left = static_cast<int>(min(params.columns - first_column, int64_t{Config::kColumns}));
  const float* gA = static_cast<const float*>(params.a) + matrix.begin;
  const float* gY = static_cast<const float*>(params.y) + summed.begin * params.y_stride +
                    first_column + 4 * quad;
  const bool has_column = 4 * quad < left;
  float* gOut = static_cast<float*>(params.out) + out_rows.begin * params.columns + first_column;

#pragma unroll 1
  for (int first = 0; first < rows; first += Config::kRows) {
    float sum[kFragments][4][4] = {};
    [[maybe_unused]] float small_sum[kSplit ? kFragments : 1][4][4] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < depth; k0 += Config::kStepK * kBatch) {
      uint32_t rY[kBatch][2][4], rA[kBatch][kFragments][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int k = k0 + 8 * b + own + 4 * i;
          uint4 words = make_uint4(0, 0, 0, 0);
          if (k < depth && has_column) {
            words = __ldg(reinterpret_cast<const uint4*>(gY + k * params.y_stride));
          }
          rY[b][i][0] = words.x, rY[b][i][1] = words.y, rY[b][i][2] = words.z,
          rY[b][i][3] = words.w;
        }
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = first + 16 * f + quad + i % 2 * 8, k = k0 + 8 * b + own + i / 2 * 4;
            rA[b][f][i] = row < rows && k < depth
                              ? __float_as_uint(__ldg(gA + row * row_stride + k * k_stride))
                              : 0;
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        uint32_t rSmallY[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) rSmallY[i][j] = split_tf32<kSplit>(rY[b][i][j]);
        }
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          uint32_t rSmallA[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) rSmallA[i] = split_tf32<kSplit>(rA[b][f][i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            ptx::mma_m16n8k8_tf32(sum[f][j], rA[b][f], rY[b][0][j], rY[b][1][j]);
            if constexpr (kSplit) {
              ptx::mma_m16n8k8_tf32(small_sum[f][j], rA[b][f], rSmallY[0][j], rSmallY[1][j]);
              ptx::mma_m16n8k8_tf32(small_sum[f][j], rSmallA, rY[b][0][j], rY[b][1][j]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + 16 * f + quad + i / 2 * 8, column = 4 * (2 * own + i % 2);
        float words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = sum[f][j][i];
          if constexpr (kSplit) {
            if (isfinite(words[j])) words[j] += small_sum[f][j][i];
          }
        }
        if (row < rows && column < left) {
          *reinterpret_cast<float4*>(gOut + row * params.columns + column) =
              make_float4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

template <typename Config>
cudaError_t launch_short_config(const ArrayJaggedBmmJaggedOutParams& params, int max_rows,
                                cudaStream_t stream) {
  const int64_t column_tiles = (params.columns + Config::kColumns - 1) / Config::kColumns;
  const int64_t warps = column_tiles * params.matrices.rows.num_seqs;
  return launch<array_jagged_bmm_jagged_out_f32_short<Config>>(
      ShortParams{params, static_cast<int>(column_tiles), max_rows},
      {(warps + Config::kWarps - 1) / Config::kWarps}, Config::kThreads, 0, stream, nullptr);
}

}  // namespace

cudaError_t launch_f32_short(const ArrayJaggedBmmJaggedOutParams& params, int max_rows,
                             cudaStream_t stream) {
  if (params.type == ElementType::kTf32)
    return params.transpose
               ? launch_short_config<ShortConfig<Tf32, true, 1, 2, 4>>(params, max_rows, stream)
               : launch_short_config<ShortConfig<Tf32, false, 1, 2, 4>>(params, max_rows, stream);
  return params.transpose
             ? launch_short_config<ShortConfig<F32, true, 1, 2, 3>>(params, max_rows, stream)
             : launch_short_config<ShortConfig<F32, false, 1, 2, 3>>(params, max_rows, stream);
}

}  // namespace jagged_cuda::gemm
