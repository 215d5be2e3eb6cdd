// Forward of jagged_flash_attention on mma.sync (compute capability 8.0 and later), 16-bit elements.
//
// For a tile of queries of one sequence and head, over tiles j of its keys:
//     S_j = Q K_j^T;  m_j = max(m_{j-1}, rowmax S_j);  P_j = exp2(c (S_j - m_j)),  c = |scale| log2(e)
//     l_j = l_{j-1} exp2(c (m_{j-1} - m_j)) + rowsum P_j;  O_j = O_{j-1} exp2(c (m_{j-1} - m_j)) + P_j V_j
// and at the end out = O / l, lse = scale m + ln l. Scores, sums and O are fp32; P is rounded to the element type for its product.
//
// Grid: x = query tiles of kTileM rows (find_tile), y = query heads. A CTA has 4 warps of 16 rows each; a warp owns whole rows, so
// that nothing but K and V is shared between warps.
//
// Shared memory, for kDim 64: Q 8 KiB, K and V 2 stages of 8 KiB each: 40 KiB (20, 80, 96 KiB for kDim 32, 128, 256). The output
// leaves through the rows of Q, each warp through its own.
//
// Barriers: one __syncthreads per key tile. Before it every thread waits for its copies of tile j; after it tile j is visible to
// all, and all have finished tile j - 1, whose stage the copies of tile j + 1 may now overwrite.
//
// A sequence of length 0 has no rows and its virtual tile exits; one without keys runs no iteration: out 0, lse -inf. Rows and
// keys past the end are zeros in shared memory, their scores -inf, and they are not stored.
#pragma once

#include "kernels/attention/mma_tile.cuh"
#include "kernels/attention/window.cuh"
#include "kernels/jagged_flash_attention.h"

#include <cmath>

namespace jagged_cuda::attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename Element_, int kDim_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileM = kWarps * kWarpRows;
  // 64 keys keep the tensor cores busy between barriers; at 256 dims O alone takes 128 registers, and 32 keys leave room.
  static constexpr int kTileN = kDim <= 128 ? 64 : 32;
  static constexpr int kStages = 2;
  static_assert(kDim % 16 == 0 && kDim <= 256);
};

template <typename Config>
struct ForwardStorage {
  using Element = typename Config::Element;
  SharedTile<Element, Config::kTileM, Config::kDim> sQ;
  SharedTile<Element, Config::kTileN, Config::kDim> sK[Config::kStages];
  SharedTile<Element, Config::kTileN, Config::kDim> sV[Config::kStages];
};

// Running maximum and sum of the two rows that a lane shares with the three others of its quad.
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};  // of this lane's columns only, until finish()

  // Turns scores into probabilities relative to the new maximum and rescales what was summed so far.
  template <int kBlocks, int kOutBlocks>
  __device__ __forceinline__ void update(RowsAccumulator<kBlocks>& s, RowsAccumulator<kOutBlocks>& o, float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        tile_max = fmaxf(tile_max, fmaxf(s[block][2 * half], s[block][2 * half + 1]));
      }
      const float new_max = fmaxf(row_max[half], quad_max(tile_max));
      // While a row has seen nothing its maximum is -inf, and -inf - -inf would be NaN: subtract 0 instead.
      const float shift = new_max == -INFINITY ? 0.0f : new_max * scale_log2;
      const float rescale = ptx::ex2_approx(row_max[half] * scale_log2 - shift);
      row_max[half] = new_max;
      float sum = 0.0f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[block][i] = ptx::ex2_approx(s[block][i] * scale_log2 - shift);
          sum += s[block][i];
        }
      }
      row_sum[half] = row_sum[half] * rescale + sum;
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        o[block][2 * half] *= rescale;
        o[block][2 * half + 1] *= rescale;
      }
    }
  }

  __device__ __forceinline__ void finish() {
    row_sum[0] = quad_sum(row_sum[0]);
    row_sum[1] = quad_sum(row_sum[1]);
  }
};

// Scores of keys that a row does not see become -inf.
template <int kBlocks>
__device__ __forceinline__ void mask_scores(RowsAccumulator<kBlocks>& s, const Window& window, int64_t row, int64_t column,
                                            int64_t num_columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const VisibleColumns visible(window, row + 8 * half, column, kBlocks * 8, num_columns);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!visible.contains(block * 8 + 2 * (lane % 4) + i)) s[block][2 * half + i] = -INFINITY;
      }
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void forward_mma_sync(const __grid_constant__ AttentionParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kTileN = Config::kTileN, kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kTileN / 8, kOutBlocks = kDim / 8;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);

  // The tile: `rows` queries from `row` on in sequence tile.seq, whose keys are kv.
  const JaggedTile tile = find_tile<kTileM>(params.q_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kTileM), tile.rows.len - tile.row));
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  Element* gOut = static_cast<Element*>(params.out.data) + global_row * params.out.row_stride + head * params.out.head_stride;
  float* gLse = static_cast<float*>(params.lse) + global_row * params.heads + head;
  if (tile.seq < 0) {
    store_zeros<kThreads>(gOut, params.out.row_stride, rows, params.dim_v);
    for (int row = threadIdx.x; row < rows; row += kThreads) gLse[static_cast<int64_t>(row) * params.heads] = -INFINITY;
    return;
  }
  const RowRange kv = sequence_rows(params.kv_offsets, tile.seq);
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const int64_t last_key = window.last_column(tile.row, rows, kv.len);
  const int64_t first_key = window.first_column(tile.row) / kTileN * kTileN;

  const Element* gQ = static_cast<const Element*>(params.q.data) + global_row * params.q.row_stride + head * params.q.head_stride;
  const Element* gK = static_cast<const Element*>(params.k.data) + kv.begin * params.k.row_stride + kv_head * params.k.head_stride;
  const Element* gV = static_cast<const Element*>(params.v.data) + kv.begin * params.v.row_stride + kv_head * params.v.head_stride;
  const auto load_keys = [&](int64_t key, int stage) {
    const int keys = static_cast<int>(min(static_cast<int64_t>(kTileN), kv.len - key));
    load_tile<kThreads>(shared.sK[stage], gK + key * params.k.row_stride, params.k.row_stride, keys, params.dim_qk, params.aligned);
    load_tile<kThreads>(shared.sV[stage], gV + key * params.v.row_stride, params.v.row_stride, keys, params.dim_v, params.aligned);
  };
  load_tile<kThreads>(shared.sQ, gQ, params.q.row_stride, rows, params.dim_qk, params.aligned);
  if (first_key < last_key) load_keys(first_key, 0);
  ptx::cp_async_commit();

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kWarpRows;
  // At least a tiny positive number: with scale 0 every score counts alike, but a masked one, -inf, must stay so.
  const float scale = static_cast<float>(params.scale), scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  OnlineSoftmax softmax;
  RowsAccumulator<kOutBlocks> o = {};
  int stage = 0;
  for (int64_t key = first_key; key < last_key; key += kTileN, stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (key + kTileN < last_key) load_keys(key + kTileN, stage ^ 1);
    ptx::cp_async_commit();

    RowsAccumulator<kScoreBlocks> s = {};
    mma_rows_by_rows<Element>(s, shared.sQ, warp_row, shared.sK[stage], lane);
    if (scale < 0.0f) {
      // The maximum of scale * S lies where -S is largest.
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[block][i] = -s[block][i];
      }
    }
    if (window.cuts_tile(tile.row, kTileM, key, kTileN, kv.len)) {
      mask_scores(s, window, tile.row + warp_row + lane / 4, key, kv.len, lane);
    }
    softmax.update(s, o, scale_log2);
    mma_accumulator_by_columns<Element>(o, s, shared.sV[stage], 0, lane);
  }
  ptx::cp_async_wait<0>();

  softmax.finish();
  float inverse_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.row_sum[half];
    inverse_sum[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = warp_row + lane / 4 + 8 * half;
    if (lane % 4 == 0 && row < rows) {
      gLse[static_cast<int64_t>(row) * params.heads] =
          sum == 0.0f ? -INFINITY : softmax.row_max[half] * fabsf(scale) + logf(sum);
    }
  }
  __syncthreads();  // without a key tile no other barrier stands between the copies of Q and its reuse
  store_rows<Element>(o, inverse_sum[0], inverse_sum[1], shared.sQ, warp_row, 0, gOut, params.out.row_stride, rows, params.dim_v,
                      params.aligned, lane);
}

}  // namespace jagged_cuda::attention
