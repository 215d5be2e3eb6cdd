// Backward of jagged_flash_attention on mma.sync (compute capability 8.0 and later), 16-bit
// elements.
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP -
// delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// Two kernels, in this order on one stream, each recomputing S and dP, so that no sum crosses a
// CTA: no atomics, no f32 copy of dq, the same bits at every run.
//   backward_dq    A CTA owns a tile of queries of one head, walks over its keys, and leaves delta
//                  behind.
//   backward_dkdv  A CTA owns a tile of keys of one kv head and walks over the queries of every
//                  head of its group. It works on S^T and dP^T, so that a warp owns 16 keys and
//                  P^T, dS^T go from accumulator to operand without leaving registers.
//
// Grid: x = tiles of kRows rows (find_tile_of), y = heads. Warps of 16 or 32 rows as in the forward
// pass. For 256 dims dK and dV of 16 rows would take 256 registers: there two warps share 16 keys
// and accumulate half of the columns each (kSplit), both computing P and dS.
//
// Shared memory, in rows of 2 kDim bytes: dq: Q and dO kRows, K and V kStep in 2 stages each, with
// 64-row tiles 16, 32, 64, 128 KiB for kDim 32, 64, 128, 256; dkdv: K and V kRows, Q and dO kStep
// in 2 stages each, lse and delta: 17, 33, 65, 97 KiB. Gradients leave through the rows of Q, or of
// K and V.
//
// Barriers: one __syncthreads when the CTA's own rows have arrived, then one per step, as in the
// forward pass.
//
// jagged_hstu_attention has, with a weight w for each row, which it keeps in the place of delta,
//     P = w silu(scale S)        dS = w silu'(scale S) * dP
//
// Biases (bias.cuh) are added to scale S. The gradient of a key's is the sum of its dS, which
// backward_dkdv has in registers. Where those of tables are wanted, backward_dq_tables takes
// backward_dq's place: each of a fixed number of CTAs takes its share of the tiles, and each of its
// warps adds dS to tables of its own (table_sums.cuh), behind the CTA's other shared memory. Keys
// that are not used get zeros.
//
// Ranges of keys (ranges.cuh) leave out steps in both kernels: of keys that no query of the tile has
// in its ranges, and of queries that have no key of the tile in theirs.
//
// Rows past the end are zeros in shared memory and P is 0 wherever a query does not see a key, so
// that they add nothing, even where lse is -inf. Rows outside all sequences get zeros; a sequence
// without queries gives zeros to its keys.
#pragma once

#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/table_sums.cuh"

#include <cfloat>

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, int kRowBlocks_, bool kGeneral_, bool kSilu_,
          bool kTables_ = false>
struct DqConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowBlocks = kRowBlocks_;  // 16-row blocks of a warp, as in the forward pass
  static constexpr bool kGeneral = kGeneral_;     // as there
  static constexpr bool kSilu = kSilu_;           // as there; with kTables params.silu counts
  static constexpr bool kTables = kTables_;       // dS is added up for the gradients of tables, too
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowBlocks * 16;
  static constexpr int kRows = kWarps * kWarpRows;  // queries that a CTA owns
  static constexpr int kStep = 32;                  // keys of an iteration
  static constexpr int kMinCtas = kRowBlocks == 2 ? 2
                                  : kDim == 32    ? 5
                                  : kDim == 64    ? (kTables ? 3 : 4)
                                  : kDim == 128   ? 3
                                                  : 1;
  static constexpr int kStages = 2;
  static constexpr bool kRestsWarps = kDim <= 64 && kRowBlocks == 1;  // as in the forward pass
  static constexpr PathName kName = PathName("cuda.attention.backward.mma_sync.d") + kDim +
                                    (kRowBlocks == 2 ? ".rows128" : "") +
                                    (kSilu      ? ".silu"
                                     : kGeneral ? ".general"
                                                : "");
};

template <typename Element_, int kDim_, int kRowBlocks_, bool kGeneral_, bool kSilu_>
struct DkdvConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowBlocks = kRowBlocks_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kSilu = kSilu_;
  static constexpr int kRowWarps = 4;
  static constexpr int kSplit = kDim <= 128 ? 1 : 2;
  static constexpr int kThreads = kRowWarps * kSplit * 32;
  static constexpr int kWarpRows = kRowBlocks * 16;
  static constexpr int kRows = kRowWarps * kWarpRows;  // keys that a CTA owns
  static constexpr int kStep = kDim <= 128 ? 32 : 16;  // queries of an iteration
  static constexpr int kMinCtas = kDim == 256       ? 1
                                  : kRowBlocks == 2 ? 2
                                  : kDim == 32      ? 5
                                  : kDim == 64      ? 3
                                                    : 2;
  static constexpr int kStages = 2;
  static constexpr bool kRestsWarps = kDim <= 64 && kRowBlocks == 1;  // as in the forward pass
};

template <typename Config>
struct DqStorage {
  using Element = typename Config::Element;
  SharedTile<Element, Config::kRows, Config::kDim> sQ;
  SharedTile<Element, Config::kRows, Config::kDim> sGradOut;
  SharedTile<Element, Config::kStep, Config::kDim> sK[Config::kStages];
  SharedTile<Element, Config::kStep, Config::kDim> sV[Config::kStages];
  BiasStorage<Config::kGeneral, Config::kRows, Config::kStep, Config::kStages> bias;
  // With kTables; behind the struct: [kWarps][time_buckets + position_buckets] sums.
  using Sums = WarpTableSums<Config::kStep / 8>;
  typename Sums::Diagonals diagonals[Config::kTables ? Config::kWarps : 1];
};

template <typename Config>
struct DkdvStorage {
  using Element = typename Config::Element;
  SharedTile<Element, Config::kRows, Config::kDim> sK;
  SharedTile<Element, Config::kRows, Config::kDim> sV;
  SharedTile<Element, Config::kStep, Config::kDim> sQ[Config::kStages];
  SharedTile<Element, Config::kStep, Config::kDim> sGradOut[Config::kStages];
  alignas(16) float sLse[Config::kStages][Config::kStep];
  alignas(16) float sDelta[Config::kStages][Config::kStep];
  BiasStorage<Config::kGeneral, Config::kRows, Config::kStep, Config::kStages> bias;
};

// sum over Dv of dO * O for one row, over the four lanes of a quad; dO is read from shared memory,
// O from global.
template <typename Element, typename Tile>
__device__ __forceinline__ float row_dot(Tile& sGradOut, int row, const Element* gOut, int columns,
                                         bool aligned, int lane) {
  float sum = 0.0f;
  if (aligned) {
    for (int first = lane % 4 * 8; first < columns; first += 32) {
      const Element* grad = sGradOut.chunk(row, first / 8);
      const uint4 packed = *reinterpret_cast<const uint4*>(gOut + first);
      const Element* out = reinterpret_cast<const Element*>(&packed);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += static_cast<float>(grad[e]) * static_cast<float>(out[e]);
    }
  } else {
    for (int column = lane % 4; column < columns; column += 4) {
      const Element grad = sGradOut.chunk(row, column / 8)[column % 8];
      sum += static_cast<float>(grad) * static_cast<float>(gOut[column]);
    }
  }
  return quad_sum(sum);
}

template <typename Config>
__device__ __forceinline__ void backward_dq_of_tile(const AttentionBackwardParams& params,
                                                    DqStorage<Config>& shared,
                                                    const JaggedTile& tile,
                                                    typename DqStorage<Config>::Sums* sums) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  using OwnRows = RowOperand<false, kRowBlocks, SharedTile<Element, kRows, kDim>>;
  using StepAddress = LaneAddress<SharedTile<Element, kStep, kDim>>;
  if (tile.row >= tile.rows.len) return;
  const bool silu = Config::kTables ? params.silu : Config::kSilu;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), tile.rows.len - tile.row));
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  Element* gGradQ = row_of<Element>(params.grad_q, global_row, head);
  if (tile.seq < 0) {
    if (params.split_by_length) return;
    store_zeros<kThreads>(gGradQ, params.grad_q.row_stride, rows, params.dim_qk);
    return;
  }
  const RowRange kv =
      Config::kGeneral ? used_rows(params, tile.seq) : sequence_rows(params.kv_offsets, tile.seq);
  if (left_to_tiny(params, tile.rows.len, kv.len)) return;
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const KeySteps<kStep, Config::kGeneral> steps(params, window, tile, rows, kv.len);

  const Element* gQ = row_of<Element>(params.q, global_row, head);
  const Element* gOut = row_of<Element>(params.out, global_row, head);
  const Element* gGradOut = row_of<Element>(params.grad_out, global_row, head);
  const Element* gK = row_of<Element>(params.k, kv.begin, kv_head);
  const Element* gV = row_of<Element>(params.v, kv.begin, kv_head);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Config::kWarpRows;
  using Bias = TileBias<false, kRows, kStep, kRowBlocks>;
  std::conditional_t<Config::kGeneral, Bias, Unbiased> bias(params, tile.rows, kv, tile.row,
                                                            warp_row);
  if constexpr (Config::kGeneral) bias.set_load_head(head);
  const auto load_keys = [&](int64_t key, int stage) {
    const int keys = static_cast<int>(min(static_cast<int64_t>(kStep), kv.len - key));
    load_tile<kThreads>(shared.sK[stage], gK + key * params.k.row_stride, params.k.row_stride, keys,
                        params.dim_qk, params.aligned);
    load_tile<kThreads>(shared.sV[stage], gV + key * params.v.row_stride, params.v.row_stride, keys,
                        params.dim_v, params.aligned);
    if constexpr (Config::kGeneral) bias.template load<kThreads>(shared.bias.steps[stage], key);
  };
  load_tile<kThreads>(shared.sQ, gQ, params.q.row_stride, rows, params.dim_qk, params.aligned);
  load_tile<kThreads>(shared.sGradOut, gGradOut, params.grad_out.row_stride, rows, params.dim_v,
                      params.aligned);
  ptx::cp_async_commit();
  if (steps.first < steps.last) load_keys(steps.first, 0);
  ptx::cp_async_commit();

  // lse and delta of the lane's two rows; a row past the end, or one that sees nothing, has P = 0.
  const float scale = static_cast<float>(params.scale),
              scale_log2 = Config::kGeneral ? kLog2E : scale * kLog2E;
  if constexpr (Config::kGeneral) {
    bias.set_head(head);
    if (!Config::kTables && params.bias.time_table != nullptr)
      shared.bias.cells.template fill<kThreads>(params.bias);
  }
  float lse_log2[kRowBlocks][2], delta[kRowBlocks][2];
  const float most_lse = params.bias.any() ? kMostLse : FLT_MAX;
  ptx::cp_async_wait<1>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      const int64_t statistic = (global_row + row) * params.heads + head;
      const bool valid = row < rows;
      if (silu) {
        delta[r][half] = row_weight<float>(params, global_row + (valid ? row : 0), kv.len);
        if (valid && lane % 4 == 0) static_cast<float*>(params.delta)[statistic] = delta[r][half];
        continue;
      }
      const float dot =
          row_dot(shared.sGradOut, row, gOut + (valid ? row : 0) * params.out.row_stride,
                  params.dim_v, params.aligned, lane);
      const float lse = valid ? static_cast<const float*>(params.lse)[statistic] : INFINITY;
      lse_log2[r][half] = Config::kGeneral ? lse_in_log2(lse, most_lse) : lse * kLog2E;
      delta[r][half] = dot - (valid && params.grad_lse != nullptr
                                  ? static_cast<const float*>(params.grad_lse)[statistic]
                                  : 0.0f);
      if (valid && lane % 4 == 0) static_cast<float*>(params.delta)[statistic] = delta[r][half];
    }
  }

  const OwnRows q_rows(shared.sQ, warp_row, lane), grad_out_rows(shared.sGradOut, warp_row, lane);
  const LaneRanges<kRowBlocks> lane_ranges(params, global_row, warp_row + lane / 4, rows);
  Accumulator<kRowBlocks, kOutBlocks> dq = {};
  int stage = 0;
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key), stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (steps.next(key) < steps.last) load_keys(steps.next(key), stage ^ 1);
    ptx::cp_async_commit();

    if (Config::kRestsWarps && warp_row >= rows) continue;

    Accumulator<kRowBlocks, kScoreBlocks> s = {}, dp = {};
    mma_rows_by_rows(s, q_rows, StepAddress::by_columns(shared.sK[stage], 0, lane));
    mma_rows_by_rows(dp, grad_out_rows, StepAddress::by_columns(shared.sV[stage], 0, lane));
    if constexpr (Config::kGeneral) {
      bias.scale_and_add(s, scale, shared.bias.steps[stage], shared.bias.cells, key, lane);
    }
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (silu) {
            const float z = s[r][block][i];
            s[r][block][i] = delta[r][i / 2] * silu_slope(z, sigmoid(z)) * dp[r][block][i];
          } else {
            const float p = ptx::ex2_approx(s[r][block][i] * scale_log2 - lse_log2[r][i / 2]);
            s[r][block][i] = p * (dp[r][block][i] - delta[r][i / 2]);
          }
        }
      }
    }
    if (window.cuts_tile(tile.row, kRows, key, kStep, kv.len)) {
      replace_unseen(s, 0.0f, window, tile.row + warp_row + lane / 4, key, kv.len, lane);
    }
    if (Config::kGeneral && params.key_ranges != nullptr) {
      replace_outside_ranges(s, 0.0f, lane_ranges, static_cast<int>(key), lane);
    }
    if constexpr (Config::kTables) {
      sums->add(bias, s, shared.bias.steps[stage], shared.bias.cells, key, lane);
    }
    mma_accumulator_by_columns(dq, s, StepAddress::by_rows(shared.sK[stage], 0, lane));
  }
  ptx::cp_async_wait<0>();
  float scales[kRowBlocks][2];
#pragma unroll
  for (int row = 0; row < kRowBlocks * 2; ++row) scales[row / 2][row % 2] = scale;
  store_rows(dq, scales, shared.sQ, warp_row, 0, gGradQ, params.grad_q.row_stride, rows,
             params.dim_qk, params.aligned, lane);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dq_mma_sync(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(128) char shared_bytes[];
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_longer
  backward_dq_of_tile<Config>(params, *reinterpret_cast<DqStorage<Config>*>(shared_bytes),
                              find_tile_of<Config::kRows>(params, params.q_offsets), nullptr);
}

// The same and the gradients of tables. Grid: x = params.table_ctas, y = heads.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dq_tables_mma_sync(
    const __grid_constant__ AttentionBackwardParams params) {
  constexpr int kWarps = Config::kWarps, kThreads = Config::kThreads;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<DqStorage<Config>*>(shared_bytes);
  auto* sSums = reinterpret_cast<float*>(&shared + 1);
  const ScoreBias& bias = params.bias;
  const int time_buckets = bias.time_table == nullptr ? 0 : bias.time_buckets,
            buckets = time_buckets + (bias.position_table == nullptr ? 0 : bias.position_buckets);
  for (int i = threadIdx.x; i < kWarps * buckets; i += kThreads) sSums[i] = 0.0f;
  if (time_buckets > 0) shared.bias.cells.template fill<kThreads>(bias);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  typename DqStorage<Config>::Sums sums(bias, sSums + warp * buckets, shared.diagonals[warp]);
  const int64_t tiles = params.q_offsets.total / Config::kRows + params.q_offsets.num_seqs + 2;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    backward_dq_of_tile<Config>(params, shared, find_tile<Config::kRows>(params.q_offsets, index),
                                &sums);
    __syncthreads();  // the next tile overwrites this one's operands
  }
  sums.flush(threadIdx.x % 32);
  __syncthreads();
  const TableSums<float> results(params, blockIdx.x, blockIdx.y);
  for (int i = threadIdx.x; i < buckets; i += kThreads) {
    float sum = 0.0f;
    for (int each = 0; each < kWarps; ++each) sum += sSums[each * buckets + i];
    (i < time_buckets ? results.times + i : results.positions + (i - time_buckets))[0] = sum;
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dkdv_mma_sync(
    const __grid_constant__ AttentionBackwardParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks, kScoreBlocks = kStep / 8,
                kOutBlocks = kDim / Config::kSplit / 8;
  using OwnRows = RowOperand<false, kRowBlocks, SharedTile<Element, kRows, kDim>>;
  using StepAddress = LaneAddress<SharedTile<Element, kStep, kDim>>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<DkdvStorage<Config>*>(shared_bytes);

  // The tile: `rows` keys from tile.row on; `queries` are the rows of q in the same sequence.
  const JaggedTile tile = find_tile_of<kRows>(params, params.kv_offsets);
  if (tile.row >= tile.rows.len) return;
  // The keys of the sequence, and the rows of this tile that are used; behind them are zeros.
  const int64_t num_keys = Config::kGeneral && tile.seq >= 0
                               ? used_keys(params, tile.seq, tile.rows.len)
                               : tile.rows.len;
  const int stored = static_cast<int>(min(static_cast<int64_t>(kRows), tile.rows.len - tile.row));
  const int rows =
      static_cast<int>(min(static_cast<int64_t>(stored), max(num_keys - tile.row, int64_t{0})));
  const int kv_head = blockIdx.y, group = params.heads / params.kv_heads;
  const int64_t global_row = tile.rows.begin + tile.row;
  Element* gGradK = row_of<Element>(params.grad_k, global_row, kv_head);
  Element* gGradV = row_of<Element>(params.grad_v, global_row, kv_head);
  if (tile.seq < 0 || (Config::kGeneral && rows == 0)) {
    if (params.split_by_length) return;
    store_zeros<kThreads>(gGradK, params.grad_k.row_stride, stored, params.dim_qk);
    store_zeros<kThreads>(gGradV, params.grad_v.row_stride, stored, params.dim_v);
    return;
  }
  const RowRange queries = sequence_rows(params.q_offsets, tile.seq);
  if (left_to_tiny(params, queries.len, tile.rows.len)) return;
  const float most_lse = params.bias.any() ? kMostLse : FLT_MAX;
  const Window window =
      Window{num_keys - queries.len, params.window_left, params.window_right}.transposed();
  const int64_t last_query = window.last_column(tile.row, rows, queries.len);
  const auto find_step = [&](int64_t query) {
    if (!Config::kGeneral || params.key_ranges == nullptr) return QueryStep{query, false};
    return find_step_that_sees<kStep>(params, queries, query, last_query, tile.row, rows);
  };
  const QueryStep first_step = find_step(window.first_column(tile.row) / kStep * kStep);

  const Element* gK = row_of<Element>(params.k, global_row, kv_head);
  const Element* gV = row_of<Element>(params.v, global_row, kv_head);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % Config::kRowWarps * Config::kWarpRows;
  using Bias = TileBias<true, kRows, kStep, kRowBlocks>;
  std::conditional_t<Config::kGeneral, Bias, Unbiased> bias(
      params, queries, {tile.rows.begin, num_keys}, tile.row, warp_row);
  const auto load_queries = [&](int head, int64_t query, int stage) {
    const int valid = static_cast<int>(min(static_cast<int64_t>(kStep), queries.len - query));
    const int64_t first = queries.begin + query;
    load_tile<kThreads>(shared.sQ[stage], row_of<Element>(params.q, first, head),
                        params.q.row_stride, valid, params.dim_qk, params.aligned);
    load_tile<kThreads>(shared.sGradOut[stage], row_of<Element>(params.grad_out, first, head),
                        params.grad_out.row_stride, valid, params.dim_v, params.aligned);
    for (int row = threadIdx.x; row < kStep; row += kThreads) {
      const int64_t statistic = (first + (row < valid ? row : 0)) * params.heads + head;
      if constexpr (!Config::kSilu) {
        ptx::cp_async_4(&shared.sLse[stage][row], static_cast<const float*>(params.lse) + statistic,
                        row < valid ? 4 : 0);
      }
      ptx::cp_async_4(&shared.sDelta[stage][row],
                      static_cast<const float*>(params.delta) + statistic, row < valid ? 4 : 0);
    }
    if constexpr (Config::kGeneral) bias.template load<kThreads>(shared.bias.steps[stage], query);
  };
  int head = kv_head * group;
  const int last_head = head + group;
  if constexpr (Config::kGeneral) bias.set_load_head(head);
  load_tile<kThreads>(shared.sK, gK, params.k.row_stride, rows, params.dim_qk, params.aligned);
  load_tile<kThreads>(shared.sV, gV, params.v.row_stride, rows, params.dim_v, params.aligned);
  ptx::cp_async_commit();
  if (first_step.query < last_query) load_queries(head, first_step.query, 0);
  ptx::cp_async_commit();

  const int column =
      warp / Config::kRowWarps * (kOutBlocks * 8);  // of dK and dV, that this warp accumulates
  const float scale = static_cast<float>(params.scale),
              scale_log2 = Config::kGeneral ? kLog2E : scale * kLog2E;
  float key_sums[kRowBlocks][2] = {};  // of this lane's columns
  if constexpr (Config::kGeneral) {
    bias.set_head(head);
    if (params.bias.time_table != nullptr) shared.bias.cells.template fill<kThreads>(params.bias);
  }
  ptx::cp_async_wait<1>();
  __syncthreads();
  const OwnRows k_rows(shared.sK, warp_row, lane), v_rows(shared.sV, warp_row, lane);
  Accumulator<kRowBlocks, kOutBlocks> dk = {}, dv = {};
  int stage = 0;
  QueryStep step = first_step;
  while (step.query < last_query && head < last_head) {
    const int64_t query = step.query;
    int next_head = head;
    QueryStep next_step = find_step(query + kStep);
    if (next_step.query >= last_query) {
      next_step = first_step;
      ++next_head;
      if constexpr (Config::kGeneral) {
        if (next_head < last_head) bias.set_load_head(next_head);
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (next_head < last_head) load_queries(next_head, next_step.query, stage ^ 1);
    ptx::cp_async_commit();

    if (!Config::kRestsWarps || warp_row < rows) {
      Accumulator<kRowBlocks, kScoreBlocks> s = {}, dp = {};  // S^T and dP^T
      mma_rows_by_rows(s, k_rows, StepAddress::by_columns(shared.sQ[stage], 0, lane));
      Accumulator<kRowBlocks, kScoreBlocks> slope;  // of silu
      if constexpr (Config::kGeneral) {
        bias.scale_and_add(s, scale, shared.bias.steps[stage], shared.bias.cells, query, lane);
      }
#pragma unroll
      for (int block = 0; !Config::kSilu && block < kScoreBlocks; ++block) {
        const float2 lse =
            *reinterpret_cast<const float2*>(&shared.sLse[stage][block * 8 + 2 * (lane % 4)]);
        float lse_log2[2] = {lse.x * kLog2E, lse.y * kLog2E};
        if constexpr (Config::kGeneral) {
          lse_log2[0] = lse_in_log2(lse.x, most_lse);
          lse_log2[1] = lse_in_log2(lse.y, most_lse);
        }
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[r][block][i] = ptx::ex2_approx(s[r][block][i] * scale_log2 - lse_log2[i % 2]);
        }
      }
      constexpr float kHidden = Config::kSilu ? kHiddenScore : 0.0f;
      if (window.cuts_tile(tile.row, kRows, query, kStep, queries.len)) {
        replace_unseen(s, kHidden, window, tile.row + warp_row + lane / 4, query, queries.len,
                       lane);
      }
      if (Config::kGeneral && step.cut) {
        const int left = static_cast<int>(min(int64_t{kStep}, queries.len - query));
        replace_outside_ranges_transposed(s, kHidden, params, queries.begin + query, left,
                                          tile.row + warp_row + lane / 4, lane);
      }
      if constexpr (Config::kSilu) {
#pragma unroll
        for (int block = 0; block < kScoreBlocks; ++block) {
          const float2 weight =
              *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float z = s[r][block][i], gate = sigmoid(z),
                          factor = i % 2 == 0 ? weight.x : weight.y;
              slope[r][block][i] = factor * silu_slope(z, gate);
              s[r][block][i] = factor * (z * gate);
            }
          }
        }
      }
      mma_accumulator_by_columns(dv, s, StepAddress::by_rows(shared.sGradOut[stage], 0, lane),
                                 column);
      mma_rows_by_rows(dp, v_rows, StepAddress::by_columns(shared.sGradOut[stage], 0, lane));
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (Config::kSilu) {
              s[r][block][i] = slope[r][block][i] * dp[r][block][i];
            } else {
              s[r][block][i] *= dp[r][block][i] - (i % 2 == 0 ? delta.x : delta.y);
            }
          }
        }
      }
      if (Config::kGeneral && params.key_sums != nullptr) add_rows(s, key_sums);
      mma_accumulator_by_columns(dk, s, StepAddress::by_rows(shared.sQ[stage], 0, lane), column);
    }
    if (Config::kGeneral && params.key_sums != nullptr && next_head != head) {
      // Warps that share rows have the same sums.
      if (column == 0)
        store_key_sums(params, key_sums, tile.rows.begin + tile.row, warp_row, rows, head, lane);
    }
    if constexpr (Config::kGeneral) {
      if (next_head != head && next_head < last_head) bias.set_head(next_head);
    }
    head = next_head;
    step = next_step;
    stage ^= 1;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps have read K and V, through whose rows the gradients leave
  float scales[kRowBlocks][2], ones[kRowBlocks][2];
#pragma unroll
  for (int row = 0; row < kRowBlocks * 2; ++row) {
    scales[row / 2][row % 2] = scale;
    ones[row / 2][row % 2] = 1.0f;
  }
  store_rows(dk, scales, shared.sK, warp_row, column, gGradK, params.grad_k.row_stride, rows,
             params.dim_qk, params.aligned, lane);
  store_rows(dv, ones, shared.sV, warp_row, column, gGradV, params.grad_v.row_stride, rows,
             params.dim_v, params.aligned, lane);
  if (Config::kGeneral && stored > rows) {
    store_zeros<kThreads>(gGradK + rows * params.grad_k.row_stride, params.grad_k.row_stride,
                          stored - rows, params.dim_qk);
    store_zeros<kThreads>(gGradV + rows * params.grad_v.row_stride, params.grad_v.row_stride,
                          stored - rows, params.dim_v);
  }
}

template <typename Element, int kDim>
cudaError_t launch_dq_tables(const AttentionBackwardParams& params, cudaStream_t stream,
                             const char* path) {
  // Fewer to compile: either score function, and head dims of 64 at least.
  using Config = DqConfig<Element, (kDim < 64 ? 64 : kDim), 1, true, false, true>;
  constexpr auto kKernel = backward_dq_tables_mma_sync<Config>;
  constexpr int kMostBuckets = 2 * 2048, kBytes = sizeof(DqStorage<Config>),
                kBytesEach = Config::kWarps * sizeof(float);
  const cudaError_t error = allow_shared_memory<kKernel>(kBytes + kMostBuckets * kBytesEach);
  if (error != cudaSuccess) return error;
  const ScoreBias& bias = params.bias;
  const int buckets = (bias.time_table == nullptr ? 0 : bias.time_buckets) +
                      (bias.position_table == nullptr ? 0 : bias.position_buckets);
  return launch<kKernel>(params, {params.table_ctas, params.heads}, Config::kThreads,
                         kBytes + buckets * kBytesEach, stream, path);
}

template <typename Element, int kDim>
cudaError_t launch_backward_mma_sync_dim(const AttentionBackwardParams& params,
                                         cudaStream_t stream) {
  return for_mma_sync(params, [&](auto row_blocks, auto ranges, auto silu) {
    constexpr bool kGeneral = ranges.value != 0, kSilu = silu.value != 0;
    using Dq = DqConfig<Element, kDim, (kDim <= 128 ? row_blocks.value : 1), kGeneral, kSilu>;
    using Dkdv = DkdvConfig<Element, kDim, (kDim <= 64 ? row_blocks.value : 1), kGeneral, kSilu>;
    const cudaError_t error =
        params.table_ctas > 0
            ? launch_dq_tables<Element, kDim>(params, stream, Dq::kName)
            : launch_longer<backward_dq_mma_sync<Dq>>(
                  params, params, tile_grid(params, params.q_offsets, Dq::kRows, params.heads),
                  Dq::kThreads, sizeof(DqStorage<Dq>), stream, Dq::kName);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_mma_sync<Dkdv>>(
        params, tile_grid(params, params.kv_offsets, Dkdv::kRows, params.kv_heads), Dkdv::kThreads,
        sizeof(DkdvStorage<Dkdv>), stream, nullptr);
  });
}

}  // namespace jagged_cuda::attention
