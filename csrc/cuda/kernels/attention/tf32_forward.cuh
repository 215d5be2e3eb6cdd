// Forward of jagged_flash_attention of f32 on mma.sync (compute capability 8.0 and later): in TF32, or
// compensated by a product in bf16 beside it (tf32_tile.cuh).
//
// The mathematics, grid and mapping are those of forward_mma_sync.cuh. In TF32 each element is rounded
// once, as it lies in shared memory, and P in registers; compensated, operands are split in registers.
//
// Shared memory: Q kTileM rows, K and V kTileN rows, of 4 kDim bytes: 24, 48 or 64, 96 or 192, 192 KiB
// for kDim 32, 64, 128, 256. One stage each: while S is computed V arrives, while O is computed the
// next K.
//
//     for each tile j of keys:   wait for K_j, round it;  __syncthreads;  start the copy of V_j
//                                S = Q K_j^T, P
//                                wait for V_j, round it;  __syncthreads;  start the copy of K_{j+1}
//                                O = O r + P V_j
//
// Barriers: after the first one all have finished O of the tile before, after the second S of this
// one: what is copied next overwrites nothing that is still read.
//
// A sequence of length 0 has no rows and its virtual tile exits; one without keys runs no
// iteration: out 0, lse -inf. Rows and keys past the end are zeros in shared memory, their scores
// -inf, and they are not stored.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/ranges.cuh"
#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/tf32_launch.cuh"
#include "cuda/kernels/attention/tf32_tile.cuh"

namespace jagged_cuda::attention {

template <bool kCompensated_, int kDim_, int kRowBlocks_>
struct Tf32ForwardConfig {
  static constexpr bool kCompensated = kCompensated_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  // 16-row blocks of a warp. Two halve the reads of K and V from shared memory, which otherwise limit
  // TF32; compensated sums leave no registers for them, nor 256 dims.
  static constexpr int kRowBlocks = kRowBlocks_;
  // Q of 128 rows and 128 dims leaves no room for a second CTA: there one has twice as many warps.
  static constexpr int kWarps = kDim == 256 || (kDim == 128 && kRowBlocks == 2) ? 8 : 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowBlocks * 16;
  static constexpr int kTileM = kWarps * kWarpRows;
  // By kDim alone, as in forward_mma_sync.cuh.
  static constexpr int kTileN = kDim == 256 ? 32 : 64;
  static constexpr int kMinCtas = kWarps == 8                      ? 1
                                  : kDim == 128 || kRowBlocks == 2 ? 2
                                  : kCompensated                   ? 3
                                                                   : 4;
  static constexpr PathName kName =
      PathName("cuda.attention.forward.mma_sync.d") + kDim +
      (kRowBlocks == 2 ? (kDim == 128 ? ".rows256" : ".rows128") : "") +
      (kCompensated ? ".f32" : ".tf32");
};

template <typename Config>
struct Tf32ForwardStorage {
  SharedTileF32<Config::kTileM, Config::kDim> sQ;
  SharedTileF32<Config::kTileN, Config::kDim> sK;
  SharedTileF32<Config::kTileN, Config::kDim> sV;
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_tf32(
    const __grid_constant__ AttentionParams params) {
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kTileN = Config::kTileN,
                kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kTileN / 8, kOutBlocks = kDim / 8;
  constexpr bool kCompensated = Config::kCompensated;
  using QTile = SharedTileF32<kTileM, kDim>;
  using KeysTile = SharedTileF32<kTileN, kDim>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<Tf32ForwardStorage<Config>*>(shared_bytes);

  // The tile: `rows` queries from `row` on in sequence tile.seq, whose keys are kv.
  const JaggedTile tile = find_tile<kTileM>(params.q_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kTileM), tile.rows.len - tile.row));
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  float* gOut = row_of<float>(params.out, global_row, head);
  float* gLse = static_cast<float*>(params.lse) + global_row * params.heads + head;
  if (tile.seq < 0) {
    store_zeros<kThreads>(gOut, params.out.row_stride, rows, params.dim_v);
    for (int row = threadIdx.x; row < rows; row += kThreads)
      gLse[static_cast<int64_t>(row) * params.heads] = -INFINITY;
    return;
  }
  const RowRange kv = sequence_rows(params.kv_offsets, tile.seq);
  if (left_to_long(params, tile.rows.len, kv.len)) return;
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const KeySteps<kTileN, false> steps(params, window, tile, rows, kv.len);

  const float* gK = row_of<float>(params.k, kv.begin, kv_head);
  const float* gV = row_of<float>(params.v, kv.begin, kv_head);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Config::kWarpRows;
  const auto load_keys = [&](KeysTile& sKeys, const float* g, int64_t row_stride, int64_t key,
                             int columns) {
    if (key < steps.last) {
      const int keys = static_cast<int>(min(static_cast<int64_t>(kTileN), kv.len - key));
      load_tile<kThreads>(sKeys, g + key * row_stride, row_stride, keys, columns, params.aligned);
    }
    ptx::cp_async_commit();
  };
  // What this thread has copied has arrived; then all of it, and no one reads what was read before.
  const auto receive = [&](KeysTile& sKeys) {
    ptx::cp_async_wait<0>();
    if constexpr (!kCompensated) round_own_chunks<kThreads>(sKeys);
    __syncthreads();
  };
  load_tile<kThreads>(shared.sQ, row_of<float>(params.q, global_row, head), params.q.row_stride,
                      rows, params.dim_qk, params.aligned);
  load_keys(shared.sK, gK, params.k.row_stride, steps.first, params.dim_qk);
  if constexpr (!kCompensated) {
    ptx::cp_async_wait<0>();
    round_own_chunks<kThreads>(shared.sQ);
  }

  // At least a tiny positive number: with scale 0 all scores are equal, but a masked one, -inf, must
  // stay so.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  const auto q_rows = LaneAddress<QTile>::by_rows(shared.sQ, warp_row, lane);
  const auto k_rows = LaneAddress<KeysTile>::by_columns(shared.sK, 0, lane);
  const ColumnAddress<KeysTile> v_columns(shared.sV, lane);
  const bool rests = warp_row >= rows;  // copies and waits
  OnlineSoftmax<kRowBlocks> softmax;
  Accumulator<kRowBlocks, kOutBlocks> o = {};
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key)) {
    receive(shared.sK);
    load_keys(shared.sV, gV, params.v.row_stride, key, params.dim_v);
    Accumulator<kRowBlocks, kScoreBlocks> s;
    if (!rests) {
      multiply_rows_by_rows<kCompensated>(s, q_rows, k_rows);
      if (scale < 0.0f) {
        // The maximum of scale * S lies where -S is largest.
#pragma unroll
        for (int i = 0; i < kRowBlocks * kScoreBlocks * 4; ++i) {
          float& score = s[i / (kScoreBlocks * 4)][i / 4 % kScoreBlocks][i % 4];
          score = -score;
        }
      }
      if (window.cuts_tile(tile.row, kTileM, key, kTileN, kv.len)) {
        replace_unseen(s, -INFINITY, window, tile.row + warp_row + lane / 4, key, kv.len, lane);
      }
      float rescale[kRowBlocks][2];
      softmax.update(s, rescale, scale_log2);
      rescale_rows(o, rescale);
    }
    receive(shared.sV);
    load_keys(shared.sK, gK, params.k.row_stride, steps.next(key), params.dim_qk);
    if (!rests) multiply_by_columns<kCompensated>(o, s, v_columns);
  }
  ptx::cp_async_wait<0>();

  softmax.finish();
  float inverse_sum[kRowBlocks][2];
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[r][half];
      inverse_sum[r][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows) {
        gLse[static_cast<int64_t>(row) * params.heads] =
            sum == 0.0f ? -INFINITY : __fmaf_rn(softmax.row_max[r][half], fabsf(scale), logf(sum));
      }
    }
  }
  const int lane_row = warp_row + lane / 4;
  store_columns(o, inverse_sum, gOut + lane_row * params.out.row_stride, params.out.row_stride,
                rows - lane_row, params.dim_v, params.aligned, lane);
}

template <bool kCompensated>
cudaError_t launch_forward_tf32(const AttentionParams& params, cudaStream_t stream) {
  return for_tf32<kCompensated, 128>(params, [&](auto dim, auto row_blocks) {
    using Config = Tf32ForwardConfig<kCompensated, dim.value, row_blocks.value>;
    return launch<forward_tf32<Config>>(
        params, tile_grid(params, params.q_offsets, Config::kTileM, params.heads), Config::kThreads,
        sizeof(Tf32ForwardStorage<Config>), stream, Config::kName);
  });
}

}  // namespace jagged_cuda::attention
