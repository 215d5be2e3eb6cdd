// Forward of jagged_flash_attention on mma.sync (compute capability 8.0 and later), 16-bit
// elements.
//
// For a tile of queries of one sequence and head, over tiles j of its keys:
//     S_j = Q K_j^T
//     m_j = max(m_{j-1}, rowmax S_j),  r_j = exp2(c (m_{j-1} - m_j)),  c = |scale| log2(e)
//     P_j = exp2(c (S_j - m_j))
//     l_j = l_{j-1} r_j + rowsum P_j,  O_j = O_{j-1} r_j + P_j V_j
// and at the end out = O / l, lse = scale m + ln l. Scores, sums and O are f32; P is rounded to
// the element type for its product.
//
// Grid: x = query tiles of kTileM rows (find_tile_of), y = query heads. A CTA has 4 warps of 16 rows
// each, or of 32 where sequences are long (launch.h); a warp owns whole rows, so that nothing but K
// and V is shared between warps.
//
// Shared memory: Q kTileM rows, K and V kTileN rows in 2 stages each, of 2 kDim bytes. With 64-row
// tiles 12, 40, 80, 96 KiB for kDim 32, 64, 128, 256. The output leaves through the rows of Q, each
// warp through its own.
//
// Barriers: one __syncthreads when Q has arrived, then one per key tile. Before it every thread
// waits for its copies of tile j; after it tile j is visible to all, and all have finished tile
// j - 1, whose stage the copies of tile j + 1 may now overwrite.
//
// Keys may also be taken away by ranges (ranges.cuh); steps of which no query of the tile sees a key
// are then left out.
//
// jagged_hstu_attention has P_j = silu(scale S_j), no statistics, and O times a weight for each row
// (silu.cuh).
//
// A sequence of length 0 has no rows and its virtual tile exits; one without keys runs no
// iteration: out 0, lse -inf. Rows and keys past the end are zeros in shared memory, their scores
// -inf, and they are not stored.
#pragma once

#include "cuda/kernels/attention/bias.cuh"
#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/ranges.cuh"
#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/silu.cuh"

#include <cmath>
#include <type_traits>

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, int kRowBlocks_, bool kGeneral_, bool kSilu_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  // 16-row blocks of a warp. Two halve the reads of K and V from shared memory and L2 per product;
  // one wastes less of short sequences, and is all that 256 dims leave registers for.
  static constexpr int kRowBlocks = kRowBlocks_;
  // Keys may be taken away by ranges (ranges.cuh), biases added and keys unused (bias.cuh): looked up
  // at run time, in registers that the others have not. Scores are scaled before all else.
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kSilu = kSilu_;  // in place of softmax (silu.cuh)
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowBlocks * 16;
  static constexpr int kTileM = kWarps * kWarpRows;
  // Chosen by time on an H100 (docs/performance_log.md). The step depends on kDim alone, so that a
  // row's bits do not depend on the tile that it lies in: the forward pass is batch-invariant.
  static constexpr int kTileN = kDim == 32 || kDim == 256 ? 32 : 64;
  static constexpr int kMinCtas = kDim == 32                      ? (kRowBlocks == 1 ? 6 : 4)
                                  : kDim == 64 && kRowBlocks == 1 ? 4
                                                                  : 2;
  static constexpr int kStages = 2;
  // Warps whose rows lie past the end only copy and wait: 7 % faster where sequences are tiny, but
  // the branch costs 2 to 5 % where they are long.
  static constexpr bool kRestsWarps = kDim <= 64 && kRowBlocks == 1;
  static constexpr bool kHoldsQ = kDim == 128 && kRowBlocks == 1;  // Q stays in registers
  static constexpr PathName kName = PathName("cuda.attention.forward.mma_sync.d") + kDim +
                                    (kRowBlocks == 2 ? ".rows128" : "") +
                                    (kSilu      ? ".silu"
                                     : kGeneral ? ".general"
                                                : "");
  static_assert(kDim % 16 == 0 && kDim <= 256);
};

template <typename Config>
struct ForwardStorage {
  using Element = typename Config::Element;
  SharedTile<Element, Config::kTileM, Config::kDim> sQ;
  SharedTile<Element, Config::kTileN, Config::kDim> sK[Config::kStages];
  SharedTile<Element, Config::kTileN, Config::kDim> sV[Config::kStages];
  BiasStorage<Config::kGeneral, Config::kTileM, Config::kTileN, Config::kStages> bias;
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void forward_mma_sync(
    const __grid_constant__ AttentionParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kTileN = Config::kTileN,
                kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kTileN / 8, kOutBlocks = kDim / 8;
  using KeysAddress = LaneAddress<SharedTile<Element, kTileN, kDim>>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardStorage<Config>*>(shared_bytes);

  // The tile: `rows` queries from `row` on in sequence tile.seq, whose keys are kv.
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_longer
  // Behind the kernel for long sequences (launch_forward_general) only sequences of one tile are left.
  const bool is_direct = Config::kGeneral && params.long_plan != nullptr;
  const JaggedTile tile =
      is_direct ? JaggedTile{blockIdx.x, sequence_rows(params.q_offsets, blockIdx.x), 0}
                : find_tile_of<kTileM>(params, params.q_offsets);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kTileM), tile.rows.len - tile.row));
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  Element* gOut = row_of<Element>(params.out, global_row, head);
  float* gLse = static_cast<float*>(params.lse) + global_row * params.heads + head;
  if (tile.seq < 0) {
    if (params.split_by_length) return;
    store_zeros<kThreads>(gOut, params.out.row_stride, rows, params.dim_v);
    for (int row = threadIdx.x; !Config::kSilu && row < rows; row += kThreads)
      gLse[static_cast<int64_t>(row) * params.heads] = -INFINITY;
    return;
  }
  const RowRange kv =
      Config::kGeneral ? used_rows(params, tile.seq) : sequence_rows(params.kv_offsets, tile.seq);
  if (left_to_tiny(params, tile.rows.len, kv.len)) return;
  if (Config::kGeneral && left_to_long(params, tile.rows.len, kv.len)) return;
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const KeySteps<kTileN, Config::kGeneral> steps(params, window, tile, rows, kv.len);

  const Element* gQ = row_of<Element>(params.q, global_row, head);
  const Element* gK = row_of<Element>(params.k, kv.begin, kv_head);
  const Element* gV = row_of<Element>(params.v, kv.begin, kv_head);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Config::kWarpRows;
  using Bias = TileBias<false, kTileM, kTileN, kRowBlocks>;
  std::conditional_t<Config::kGeneral, Bias, Unbiased> bias(params, tile.rows, kv, tile.row,
                                                            warp_row);
  if constexpr (Config::kGeneral) bias.set_load_head(head);
  const auto load_keys = [&](int64_t key, int stage) {
    const int keys = static_cast<int>(min(static_cast<int64_t>(kTileN), kv.len - key));
    load_tile<kThreads>(shared.sK[stage], gK + key * params.k.row_stride, params.k.row_stride, keys,
                        params.dim_qk, params.aligned);
    load_tile<kThreads>(shared.sV[stage], gV + key * params.v.row_stride, params.v.row_stride, keys,
                        params.dim_v, params.aligned);
    if constexpr (Config::kGeneral) bias.template load<kThreads>(shared.bias.steps[stage], key);
  };
  load_tile<kThreads>(shared.sQ, gQ, params.q.row_stride, rows, params.dim_qk, params.aligned);
  ptx::cp_async_commit();
  if (steps.first < steps.last) load_keys(steps.first, 0);
  ptx::cp_async_commit();

  // At least a tiny positive number: with scale 0 all scores are equal, but a
  // masked one, -inf, must stay so.
  const float scale = static_cast<float>(params.scale),
              // Of logits, in the general kernel, scale is part already.
      scale_log2 = Config::kGeneral ? kLog2E : fmaxf(fabsf(scale) * kLog2E, 1e-30f);
  if constexpr (Config::kGeneral) {
    bias.set_head(head);
    if (params.bias.time_table != nullptr) shared.bias.cells.template fill<kThreads>(params.bias);
  }
  ptx::cp_async_wait<1>();
  __syncthreads();
  const RowOperand<Config::kHoldsQ, kRowBlocks, SharedTile<Element, kTileM, kDim>> q_rows(
      shared.sQ, warp_row, lane);
  const LaneRanges<kRowBlocks> lane_ranges(params, global_row, warp_row + lane / 4, rows);
  OnlineSoftmax<kRowBlocks> softmax;
  Accumulator<kRowBlocks, kOutBlocks> o = {};
  constexpr float kHidden = Config::kSilu ? kHiddenScore : -INFINITY;
  int stage = 0;
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key), stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (steps.next(key) < steps.last) load_keys(steps.next(key), stage ^ 1);
    ptx::cp_async_commit();

    if (Config::kRestsWarps && warp_row >= rows) continue;

    Accumulator<kRowBlocks, kScoreBlocks> s = {};
    mma_rows_by_rows(s, q_rows, KeysAddress::by_columns(shared.sK[stage], 0, lane));
    if constexpr (Config::kGeneral) {
      bias.scale_and_add(s, scale, shared.bias.steps[stage], shared.bias.cells, key, lane);
    } else if (scale < 0.0f) {
      // The maximum of scale * S lies where -S is largest.
#pragma unroll
      for (int i = 0; i < kRowBlocks * kScoreBlocks * 4; ++i) {
        float& score = s[i / (kScoreBlocks * 4)][i / 4 % kScoreBlocks][i % 4];
        score = -score;
      }
    }
    if (window.cuts_tile(tile.row, kTileM, key, kTileN, kv.len)) {
      replace_unseen(s, kHidden, window, tile.row + warp_row + lane / 4, key, kv.len, lane);
    }
    if (Config::kGeneral && params.key_ranges != nullptr) {
      replace_outside_ranges(s, kHidden, lane_ranges, static_cast<int>(key), lane);
    }
    if constexpr (Config::kSilu) {
      for_each_score(s, [](float& score) { score *= sigmoid(score); });
    } else {
      float rescale[kRowBlocks][2];
      softmax.template update<Config::kGeneral>(s, rescale, scale_log2);
      rescale_rows(o, rescale);
    }
    mma_accumulator_by_columns(o, s, KeysAddress::by_rows(shared.sV[stage], 0, lane));
  }
  ptx::cp_async_wait<0>();

  softmax.finish();
  float inverse_sum[kRowBlocks][2];  // of silu: the rows' weights
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Config::kSilu) {
        const int row = min(warp_row + 16 * r + 8 * half + lane / 4, rows - 1);
        inverse_sum[r][half] = row_weight<float>(params, global_row + row, kv.len);
        continue;
      }
      const float sum = softmax.row_sum[r][half];
      inverse_sum[r][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows) {
        gLse[static_cast<int64_t>(row) * params.heads] =
            sum == 0.0f ? -INFINITY
                        : __fmaf_rn(softmax.row_max[r][half],
                                    Config::kGeneral ? 1.0f : fabsf(scale), logf(sum));
      }
    }
  }
  store_rows(o, inverse_sum, shared.sQ, warp_row, 0, gOut, params.out.row_stride, rows,
             params.dim_v, params.aligned, lane);
}

template <typename Element, int kDim>
cudaError_t launch_forward_mma_sync_dim(const AttentionParams& params, cudaStream_t stream) {
  return for_mma_sync(params, [&](auto row_blocks, auto ranges, auto silu) {
    using Config = ForwardConfig<Element, kDim, (kDim <= 128 ? row_blocks.value : 1),
                                 ranges.value != 0, silu.value != 0>;
    constexpr auto kKernel = forward_mma_sync<Config>;
    constexpr int kSharedBytes = sizeof(ForwardStorage<Config>);
    if (Config::kGeneral && params.long_plan != nullptr) {
      return launch_dependent<kKernel>(params, Grid{params.q_offsets.num_seqs, params.heads},
                                       Config::kThreads, kSharedBytes, stream);
    }
    return launch_longer<kKernel>(params, params,
                                  tile_grid(params, params.q_offsets, Config::kTileM, params.heads),
                                  Config::kThreads, kSharedBytes, stream, Config::kName);
  });
}

}  // namespace jagged_cuda::attention
