// Forward of jagged_flash_attention on wgmma (compute capability 9.0), 16-bit elements. The
// mathematics is that of forward_mma_sync.cuh; there every warp reads K and V from shared memory
// for itself, here the tensor cores read them once for four warps, and no instruction loads
// operands.
//
// Grid: x = query tiles of kTileM rows (find_tile), y = query heads. A CTA is one warpgroup, whose
// warps own 16 whole rows each.
//
// Shared memory: Q kTileM rows, K and V kTileN rows in 2 stages each, of 2 kDim bytes: 40 KiB for
// 64 dims. For 128 dims 64 KiB: Q goes to registers, by way of the second stage of V, which is not
// needed before. The output leaves through the rows of Q.
//
// Barriers: one __syncthreads when Q has arrived (where it goes to registers), then one per key
// tile. Before it every thread waits for its copies of tile j and makes them visible to the tensor
// cores (fence.proxy.async), and for its products with tile j - 1; after it tile j is visible to
// all, and the stage of tile j - 1 may be overwritten by the copies of tile j + 1.
//
// A sequence of length 0 has no rows and its virtual tile exits; one without keys runs no
// iteration: out 0, lse -inf. Rows and keys past the end are zeros in shared memory, their scores
// -inf, and they are not stored.
#pragma once

#include "kernels/attention/forward_mma_sync.cuh"
#include "kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct ForwardWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  static constexpr int kThreads = 128;
  static constexpr int kTileM = 64;
  // Chosen by time on an H100 (docs/performance_log.md). Nothing depends on the batch, so that a
  // row's bits depend on its own sequence alone: the forward pass is batch-invariant.
  static constexpr int kTileN = 64;
  static constexpr int kMinBlocks = kDim == 64 ? 4 : 3;
  static constexpr bool kHoldsQ = kDim == 128;  // leaves shared memory for a third CTA
  static_assert(kDim == 64 || kDim == 128);
};

template <typename Config>
struct ForwardWgmmaStorage {
  using Tile = WarpgroupTile<typename Config::Element, 64, Config::kDim>;
  static_assert(Config::kTileM == Tile::kRows && Config::kTileN == Tile::kRows);
  // K and V in two stages each, and Q where it has room of its own.
  Tile tiles[Config::kHoldsQ ? 4 : 5];

  __device__ __forceinline__ Tile& k(int stage) { return tiles[stage]; }
  __device__ __forceinline__ Tile& v(int stage) { return tiles[2 + stage]; }
  __device__ __forceinline__ Tile& q() { return tiles[Config::kHoldsQ ? 3 : 4]; }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinBlocks) void forward_wgmma(
    const __grid_constant__ AttentionParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kTileN = Config::kTileN,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kTileN / 8, kOutBlocks = kDim / 8;
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardWgmmaStorage<Config>*>(wgmma_shared_bytes);

  // The tile: `rows` queries from `row` on in sequence tile.seq, whose keys are kv.
  const JaggedTile tile = find_tile<kTileM>(params.q_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kTileM, num_queries - row);
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + row;
  if (tile.seq < 0) {
    store_zeros<kThreads>(row_of<Element>(params.out, global_row, head), params.out.row_stride,
                          rows, params.dim_v);
    for (int r = threadIdx.x; r < rows; r += kThreads)
      static_cast<float*>(params.lse)[(global_row + r) * params.heads + head] = -INFINITY;
    return;
  }
  const RowRange kv = sequence_rows(params.kv_offsets, tile.seq);
  const int num_keys = static_cast<int>(kv.len);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const int last_key = window.last_column(row, rows, num_keys);
  const int first_key = window.first_column(row) / kTileN * kTileN;

  const auto load_keys = [&](int key, int stage) {
    load_tile<kThreads>(shared.k(stage), row_of<Element>(params.k, kv.begin + key, kv_head),
                        params.k.row_stride, num_keys - key, params.dim_qk, true);
    load_tile<kThreads>(shared.v(stage), row_of<Element>(params.v, kv.begin + key, kv_head),
                        params.v.row_stride, num_keys - key, params.dim_v, true);
  };
  load_tile<kThreads>(shared.q(), row_of<Element>(params.q, global_row, head), params.q.row_stride,
                      rows, params.dim_qk, true);
  ptx::cp_async_commit();
  if (first_key < last_key) load_keys(first_key, 0);
  ptx::cp_async_commit();

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  // At least a tiny positive number: with scale 0 every score counts alike, but a masked one, -inf,
  // must stay so.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  using Tile = typename ForwardWgmmaStorage<Config>::Tile;
  if (Config::kHoldsQ) {
    ptx::cp_async_wait<1>();
    __syncthreads();
  }
  const RowOperand<Config::kHoldsQ, 1, Tile> q_rows(shared.q(), warp_row, lane);
  OnlineSoftmax<1> softmax;
  Accumulator<1, kOutBlocks> o = {};
  int stage = 0;
  for (int key = first_key; key < last_key; key += kTileN, stage ^= 1) {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncthreads();
    Accumulator<1, kScoreBlocks> s;
    ptx::wgmma_fence();
    if constexpr (Config::kHoldsQ) {
      wgmma_rows_by_rows(s, q_rows, shared.k(stage));
    } else {
      wgmma_rows_by_rows(s, shared.q(), 0, shared.k(stage));
    }
    ptx::wgmma_commit_group();
    if (key + kTileN < last_key) load_keys(key + kTileN, stage ^ 1);
    ptx::cp_async_commit();
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(s[0]);

    if (scale < 0.0f) {
      // The maximum of scale * S lies where -S is largest.
#pragma unroll
      for (int i = 0; i < kScoreBlocks * 4; ++i) s[0][i / 4][i % 4] = -s[0][i / 4][i % 4];
    }
    if (window.cuts_tile(row, kTileM, key, kTileN, num_keys)) {
      replace_unseen(s, -INFINITY, window, row + warp_row + lane / 4, key, num_keys, lane);
    }
    softmax.update(s, o, scale_log2);
    const PackedRows<Element, kScoreBlocks> p(s);
    ptx::pin_registers(o[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(o, p, shared.v(stage));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin_registers(o[0]);
  }
  ptx::cp_async_wait<0>();
  if (Config::kHoldsQ)
    __syncthreads();  // all products are done with V, through whose rows o leaves

  softmax.finish();
  float inverse_sum[1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = softmax.row_sum[0][half];
    inverse_sum[0][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int own_row = warp_row + 8 * half + lane / 4;
    if (lane % 4 == 0 && own_row < rows) {
      static_cast<float*>(params.lse)[(global_row + own_row) * params.heads + head] =
          sum == 0.0f ? -INFINITY : softmax.row_max[0][half] * fabsf(scale) + logf(sum);
    }
  }
  store_rows(o, inverse_sum, shared.q(), warp_row, 0, row_of<Element>(params.out, global_row, head),
             params.out.row_stride, rows, params.dim_v, true, lane);
}

}  // namespace jagged_cuda::attention
