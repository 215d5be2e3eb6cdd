// Backward of jagged_flash_attention of f32 on mma.sync (compute capability 8.0 and later): in TF32, or
// compensated by a product in bf16 beside it (tf32_tile.cuh).
//
// The mathematics, grid, order of the kernels and mapping are those of backward_mma_sync.cuh: first
// backward_dq_tf32, which leaves delta behind, then backward_dkdv_tf32, which works on S^T and dP^T.
// Each recomputes S and dP, so no sum crosses a CTA: no atomics, the same bits at every run. In TF32
// each element is rounded once, as it lies in shared memory, P and dS in registers; compensated,
// operands are split in registers. delta is of dO as it is in memory.
//
// For 256 dims two warps share 16 rows, and each sums half of the columns (kSplit).
//
// Shared memory, in rows of 4 kDim bytes: dq: Q and dO kRows, K and V kStep in 2 stages each; dkdv: K
// and V kRows, Q and dO kStep in 2 stages each, lse and delta. 32, 64 or 96, 192, 192 KiB for kDim 32,
// 64, 128, 256.
//
// Barriers: one __syncthreads per step. Before it every thread waits for its copies of the step, and
// rounds them; after it the step is visible to all, and all have finished the one before, whose
// stage is copied to next.
//
// Rows past the end are zeros in shared memory and P is 0 wherever a query does not see a key. Rows
// outside all sequences get zeros; a sequence without queries gives zeros to its keys.
#pragma once

#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/mask.cuh"
#include "cuda/kernels/attention/ranges.cuh"
#include "cuda/kernels/attention/tf32_launch.cuh"
#include "cuda/kernels/attention/tf32_tile.cuh"

namespace jagged_cuda::attention {

// Of both kernels: rows are those that a CTA owns, steps what it walks over.
template <bool kCompensated_, int kDim_, int kRowBlocks_>
struct Tf32BackwardConfig {
  static constexpr bool kCompensated = kCompensated_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowBlocks = kRowBlocks_;  // 16-row blocks of a warp, as in the forward pass
  static constexpr int kRowWarps = kDim == 128 ? 8 : 4;  // there one CTA fills an SM
  static constexpr int kSplit = kDim == 256 ? 2 : 1;
  static constexpr int kThreads = kRowWarps * kSplit * 32;
  static constexpr int kWarpRows = kRowBlocks * 16;
  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kStep = kDim == 256 ? 16 : 32;
  static constexpr int kStages = 2;
  static constexpr int kOutBlocks = kDim / kSplit / 8;
  static constexpr int kMinCtas = kDim >= 128 ? 1 : kRowBlocks == 2 ? 2 : kDim == 64 ? 3 : 4;
  static constexpr PathName kName = PathName("cuda.attention.backward.mma_sync.d") + kDim +
                                    (kRowBlocks == 2 ? ".rows128" : "") +
                                    (kCompensated ? ".f32" : ".tf32");
  using Rows = SharedTileF32<kRows, kDim>;
  using Steps = SharedTileF32<kStep, kDim>;
};

template <typename Config>
struct Tf32DqStorage {
  typename Config::Rows sQ;
  typename Config::Rows sGradOut;
  typename Config::Steps sK[Config::kStages];
  typename Config::Steps sV[Config::kStages];
};

template <typename Config>
struct Tf32DkdvStorage {
  typename Config::Rows sK;
  typename Config::Rows sV;
  typename Config::Steps sQ[Config::kStages];
  typename Config::Steps sGradOut[Config::kStages];
  alignas(16) float sLse[Config::kStages][Config::kStep];
  alignas(16) float sDelta[Config::kStages][Config::kStep];
};

// sum over Dv of dO * O for one row, over the four lanes of a quad.
__device__ __forceinline__ float row_dot_f32(const float* gGradOut, const float* gOut, int columns,
                                             bool aligned, int lane) {
  float sum = 0.0f;
  if (aligned) {
    for (int first = lane % 4 * 4; first < columns; first += 16) {
      const float4 grad = *reinterpret_cast<const float4*>(gGradOut + first),
                   out = *reinterpret_cast<const float4*>(gOut + first);
      sum += grad.x * out.x + grad.y * out.y + (grad.z * out.z + grad.w * out.w);
    }
  } else {
    for (int column = lane % 4; column < columns; column += 4)
      sum += gGradOut[column] * gOut[column];
  }
  return quad_sum(sum);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dq_tf32(
    const __grid_constant__ AttentionBackwardParams params) {
  constexpr int kRows = Config::kRows, kStep = Config::kStep, kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kStep / 8,
                kOutBlocks = Config::kOutBlocks;
  constexpr bool kCompensated = Config::kCompensated;
  using RowAddress = LaneAddress<typename Config::Rows>;
  using StepAddress = LaneAddress<typename Config::Steps>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<Tf32DqStorage<Config>*>(shared_bytes);

  const JaggedTile tile = find_tile<kRows>(params.q_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), tile.rows.len - tile.row));
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  float* gGradQ = row_of<float>(params.grad_q, global_row, head);
  if (tile.seq < 0) {
    store_zeros<kThreads>(gGradQ, params.grad_q.row_stride, rows, params.dim_qk);
    return;
  }
  const RowRange kv = sequence_rows(params.kv_offsets, tile.seq);
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const KeySteps<kStep, false> steps(params, window, tile, rows, kv.len);

  const float* gOut = row_of<float>(params.out, global_row, head);
  const float* gGradOut = row_of<float>(params.grad_out, global_row, head);
  const float* gK = row_of<float>(params.k, kv.begin, kv_head);
  const float* gV = row_of<float>(params.v, kv.begin, kv_head);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % Config::kRowWarps * Config::kWarpRows;
  const int column = warp / Config::kRowWarps * (kOutBlocks * 8);  // of dQ, that this warp sums
  const auto load_keys = [&](int64_t key, int stage) {
    if (key < steps.last) {
      const int keys = static_cast<int>(min(static_cast<int64_t>(kStep), kv.len - key));
      load_tile<kThreads>(shared.sK[stage], gK + key * params.k.row_stride, params.k.row_stride,
                          keys, params.dim_qk, params.aligned);
      load_tile<kThreads>(shared.sV[stage], gV + key * params.v.row_stride, params.v.row_stride,
                          keys, params.dim_v, params.aligned);
    }
    ptx::cp_async_commit();
  };
  load_tile<kThreads>(shared.sQ, row_of<float>(params.q, global_row, head), params.q.row_stride,
                      rows, params.dim_qk, params.aligned);
  load_tile<kThreads>(shared.sGradOut, gGradOut, params.grad_out.row_stride, rows, params.dim_v,
                      params.aligned);
  load_keys(steps.first, 0);

  // lse and delta of the lane's rows; a row past the end has P = 0.
  const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
  float lse_log2[kRowBlocks][2], delta[kRowBlocks][2];
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      const bool valid = row < rows;
      const int64_t there = valid ? row : 0;
      const int64_t statistic = (global_row + there) * params.heads + head;
      const float dot =
          row_dot_f32(gGradOut + there * params.grad_out.row_stride,
                      gOut + there * params.out.row_stride, params.dim_v, params.aligned, lane);
      lse_log2[r][half] =
          valid ? static_cast<const float*>(params.lse)[statistic] * kLog2E : INFINITY;
      delta[r][half] =
          dot - (params.grad_lse != nullptr ? static_cast<const float*>(params.grad_lse)[statistic]
                                            : 0.0f);
      if (valid && column == 0 && lane % 4 == 0)
        static_cast<float*>(params.delta)[statistic] = delta[r][half];
    }
  }
  if constexpr (!kCompensated) {
    ptx::cp_async_wait<0>();
    round_own_chunks<kThreads>(shared.sQ);
    round_own_chunks<kThreads>(shared.sGradOut);
  }

  const auto q_rows = RowAddress::by_rows(shared.sQ, warp_row, lane),
             grad_out_rows = RowAddress::by_rows(shared.sGradOut, warp_row, lane);
  const bool rests = warp_row >= rows;  // copies and waits
  Accumulator<kRowBlocks, kOutBlocks> dq = {};
  int stage = 0;
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key), stage ^= 1) {
    ptx::cp_async_wait<0>();
    if constexpr (!kCompensated) {
      round_own_chunks<kThreads>(shared.sK[stage]);
      round_own_chunks<kThreads>(shared.sV[stage]);
    }
    __syncthreads();
    load_keys(steps.next(key), stage ^ 1);
    if (rests) continue;

    Accumulator<kRowBlocks, kScoreBlocks> s, dp;
    multiply_rows_by_rows<kCompensated>(s, q_rows,
                                        StepAddress::by_columns(shared.sK[stage], 0, lane));
    multiply_rows_by_rows<kCompensated>(dp, grad_out_rows,
                                        StepAddress::by_columns(shared.sV[stage], 0, lane));
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = ptx::ex2_approx(s[r][block][i] * scale_log2 - lse_log2[r][i / 2]);
          s[r][block][i] = p * (dp[r][block][i] - delta[r][i / 2]);
        }
      }
    }
    if (window.cuts_tile(tile.row, kRows, key, kStep, kv.len)) {
      replace_unseen(s, 0.0f, window, tile.row + warp_row + lane / 4, key, kv.len, lane);
    }
    multiply_by_columns<kCompensated>(
        dq, s, ColumnAddress<typename Config::Steps>(shared.sK[stage], lane, column));
  }
  ptx::cp_async_wait<0>();
  float scales[kRowBlocks][2];
#pragma unroll
  for (int row = 0; row < kRowBlocks * 2; ++row) scales[row / 2][row % 2] = scale;
  const int lane_row = warp_row + lane / 4;
  store_columns(dq, scales, gGradQ + lane_row * params.grad_q.row_stride + column,
                params.grad_q.row_stride, rows - lane_row, params.dim_qk - column, params.aligned,
                lane);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dkdv_tf32(
    const __grid_constant__ AttentionBackwardParams params) {
  constexpr int kRows = Config::kRows, kStep = Config::kStep, kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kStep / 8,
                kOutBlocks = Config::kOutBlocks;
  constexpr bool kCompensated = Config::kCompensated;
  using RowAddress = LaneAddress<typename Config::Rows>;
  using StepAddress = LaneAddress<typename Config::Steps>;
  using StepColumns = ColumnAddress<typename Config::Steps>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<Tf32DkdvStorage<Config>*>(shared_bytes);

  // The tile: `rows` keys from tile.row on; `queries` are the rows of q in the same sequence.
  const JaggedTile tile = find_tile<kRows>(params.kv_offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), tile.rows.len - tile.row));
  const int kv_head = blockIdx.y, group = params.heads / params.kv_heads;
  const int64_t global_row = tile.rows.begin + tile.row;
  float* gGradK = row_of<float>(params.grad_k, global_row, kv_head);
  float* gGradV = row_of<float>(params.grad_v, global_row, kv_head);
  if (tile.seq < 0) {
    store_zeros<kThreads>(gGradK, params.grad_k.row_stride, rows, params.dim_qk);
    store_zeros<kThreads>(gGradV, params.grad_v.row_stride, rows, params.dim_v);
    return;
  }
  const RowRange queries = sequence_rows(params.q_offsets, tile.seq);
  const Window window =
      Window{tile.rows.len - queries.len, params.window_left, params.window_right}.transposed();
  const int64_t first_query = window.first_column(tile.row) / kStep * kStep,
                last_query = window.last_column(tile.row, rows, queries.len);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % Config::kRowWarps * Config::kWarpRows;
  const int column = warp / Config::kRowWarps * (kOutBlocks * 8);  // of dK and dV
  const auto load_queries = [&](int head, int64_t query, int stage) {
    if (query < last_query) {
      const int valid = static_cast<int>(min(static_cast<int64_t>(kStep), queries.len - query));
      const int64_t first = queries.begin + query;
      load_tile<kThreads>(shared.sQ[stage], row_of<float>(params.q, first, head),
                          params.q.row_stride, valid, params.dim_qk, params.aligned);
      load_tile<kThreads>(shared.sGradOut[stage], row_of<float>(params.grad_out, first, head),
                          params.grad_out.row_stride, valid, params.dim_v, params.aligned);
      if (threadIdx.x < kStep) {
        const int row = threadIdx.x;
        const int64_t statistic = (first + (row < valid ? row : 0)) * params.heads + head;
        ptx::cp_async_4(&shared.sLse[stage][row], static_cast<const float*>(params.lse) + statistic,
                        row < valid ? 4 : 0);
        ptx::cp_async_4(&shared.sDelta[stage][row],
                        static_cast<const float*>(params.delta) + statistic, row < valid ? 4 : 0);
      }
    }
    ptx::cp_async_commit();
  };
  int head = kv_head * group;
  const int last_head = head + group;
  load_tile<kThreads>(shared.sK, row_of<float>(params.k, global_row, kv_head), params.k.row_stride,
                      rows, params.dim_qk, params.aligned);
  load_tile<kThreads>(shared.sV, row_of<float>(params.v, global_row, kv_head), params.v.row_stride,
                      rows, params.dim_v, params.aligned);
  load_queries(head, first_query, 0);
  if constexpr (!kCompensated) {
    ptx::cp_async_wait<0>();
    round_own_chunks<kThreads>(shared.sK);
    round_own_chunks<kThreads>(shared.sV);
  }

  const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
  const auto k_rows = RowAddress::by_rows(shared.sK, warp_row, lane),
             v_rows = RowAddress::by_rows(shared.sV, warp_row, lane);
  const bool rests = warp_row >= rows;  // copies and waits
  Accumulator<kRowBlocks, kOutBlocks> dk = {}, dv = {};
  int64_t query = first_query;
  for (int stage = 0; query < last_query && head < last_head; stage ^= 1) {
    int next_head = head;
    int64_t next_query = query + kStep;
    if (next_query >= last_query) {
      next_query = first_query;
      ++next_head;
    }
    ptx::cp_async_wait<0>();
    if constexpr (!kCompensated) {
      round_own_chunks<kThreads>(shared.sQ[stage]);
      round_own_chunks<kThreads>(shared.sGradOut[stage]);
    }
    __syncthreads();
    if (next_head < last_head) load_queries(next_head, next_query, stage ^ 1);

    if (!rests) {
      Accumulator<kRowBlocks, kScoreBlocks> s, dp;  // S^T and dP^T
      multiply_rows_by_rows<kCompensated>(s, k_rows,
                                          StepAddress::by_columns(shared.sQ[stage], 0, lane));
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const float2 lse =
            *reinterpret_cast<const float2*>(&shared.sLse[stage][block * 8 + 2 * (lane % 4)]);
        const float lse_log2[2] = {lse.x * kLog2E, lse.y * kLog2E};
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[r][block][i] = ptx::ex2_approx(s[r][block][i] * scale_log2 - lse_log2[i % 2]);
        }
      }
      if (window.cuts_tile(tile.row, kRows, query, kStep, queries.len)) {
        replace_unseen(s, 0.0f, window, tile.row + warp_row + lane / 4, query, queries.len, lane);
      }
      multiply_by_columns<kCompensated>(dv, s, StepColumns(shared.sGradOut[stage], lane, column));
      multiply_rows_by_rows<kCompensated>(dp, v_rows,
                                          StepAddress::by_columns(shared.sGradOut[stage], 0, lane));
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[r][block][i] *= dp[r][block][i] - (i % 2 == 0 ? delta.x : delta.y);
        }
      }
      multiply_by_columns<kCompensated>(dk, s, StepColumns(shared.sQ[stage], lane, column));
    }
    head = next_head;
    query = next_query;
  }
  ptx::cp_async_wait<0>();
  float scales[kRowBlocks][2], ones[kRowBlocks][2];
#pragma unroll
  for (int row = 0; row < kRowBlocks * 2; ++row) {
    scales[row / 2][row % 2] = scale;
    ones[row / 2][row % 2] = 1.0f;
  }
  const int lane_row = warp_row + lane / 4;
  store_columns(dk, scales, gGradK + lane_row * params.grad_k.row_stride + column,
                params.grad_k.row_stride, rows - lane_row, params.dim_qk - column, params.aligned,
                lane);
  store_columns(dv, ones, gGradV + lane_row * params.grad_v.row_stride + column,
                params.grad_v.row_stride, rows - lane_row, params.dim_v - column, params.aligned,
                lane);
}

template <bool kCompensated>
cudaError_t launch_backward_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_tf32<kCompensated, 64>(params, [&](auto dim, auto row_blocks) {
    using Config = Tf32BackwardConfig<kCompensated, dim.value, row_blocks.value>;
    const cudaError_t error = launch<backward_dq_tf32<Config>>(
        params, tile_grid(params, params.q_offsets, Config::kRows, params.heads), Config::kThreads,
        sizeof(Tf32DqStorage<Config>), stream, Config::kName);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_tf32<Config>>(
        params, tile_grid(params, params.kv_offsets, Config::kRows, params.kv_heads),
        Config::kThreads, sizeof(Tf32DkdvStorage<Config>), stream, nullptr);
  });
}

}  // namespace jagged_cuda::attention
