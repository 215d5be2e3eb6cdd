// Backward of jagged_flash_attention on wgmma (compute capability 9.0), 16-bit elements.
// Mathematics, kernels and their order are those of backward_mma_sync.cuh: backward_dq, which
// leaves delta behind, then backward_dkdv, each recomputing S and dP; no atomics, the same bits at
// every run.
//
// Grid: x = tiles of kRows rows (find_tile_of), y = heads. A warpgroup owns 64 rows, a warp 16 of
// them.
//
// Shared memory, in rows of 2 kDim bytes: dq: Q and dO kRows, K and V kStep in 2 stages each; dkdv:
// K and V kRows, Q and dO kStep in 2 stages each, lse and delta. With steps of 64 both take 48 KiB
// for 64 dims and 96 for 128 (dkdv 1 more), with steps of 32 both 32 for 64. Gradients leave
// through the rows of Q, or of K and V.
//
// Barriers: one __syncthreads per step: every thread has waited for its copies of the step, and all
// have finished the step before, whose stage is filled next. dq has one more, when dO has arrived
// (each warp reads its rows of it for delta), and a barrier of the warpgroup before dq leaves; dkdv
// one before dk and dv leave.
//
// Of head dims of 65 to 128 only tiles that are looked for in slabs, or by sequence, come here; others go to
// backward_bulk.cuh.
//
// Rows past the end are zeros in shared memory and P is 0 wherever a query does not see a key, so
// that they add nothing, even where lse is -inf. Rows outside all sequences get zeros; a sequence
// without queries gives zeros to its keys.
#pragma once

#include "cuda/kernels/attention/backward_mma_sync.cuh"
#include "cuda/kernels/attention/forward_wgmma.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"

namespace jagged_cuda::attention {

// Steps and CTAs per SM are chosen by time on an H100 (docs/performance_log.md): with 64 dims small
// steps leave room for more CTAs, which hide each other's latency where sequences are short; where
// they are long, large steps keep the tensor cores busier. `kStep_` is one of 32 and 64.
template <typename Element_, int kDim_, int kStep_>
struct DqWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;      // queries that a CTA owns
  static constexpr int kStep = kStep_;  // keys of an iteration
  static constexpr int kMinCtas = kDim == 128 ? 2 : kStep == 64 ? 4 : (kDim == 64 ? 5 : 6);
  static constexpr PathName kName = PathName("cuda.attention.backward.wgmma.d") + kDim +
                                    (kDim <= 64 && kStep == 64 ? ".step64" : "");
  static_assert(kDim <= 64 || (kDim == 128 && kStep == 64));
};

template <typename Element_, int kDim_, int kStep_>
struct DkdvWgmmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;      // keys that a CTA owns
  static constexpr int kStep = kStep_;  // queries of an iteration
  static constexpr int kMinCtas = kDim == 128   ? 2
                                  : kStep == 64 ? (kDim == 64 ? 3 : 4)
                                                : (kDim == 64 ? 4 : 5);
  static_assert(kDim <= 64 || (kDim == 128 && kStep == 64));
};

template <typename Config>
struct DqWgmmaStorage {
  using Element = typename Config::Element;
  WarpgroupTile<Element, Config::kRows, Config::kDim> sQ, sGradOut;
  WarpgroupTile<Element, Config::kStep, Config::kDim> sK[2], sV[2];
  JaggedTile tile;  // of TilesOfCta
};

template <typename Config>
struct DkdvWgmmaStorage {
  using Element = typename Config::Element;
  WarpgroupTile<Element, Config::kRows, Config::kDim> sK, sV;
  WarpgroupTile<Element, Config::kStep, Config::kDim> sQ[2], sGradOut[2];
  alignas(16) float sLse[2][Config::kStep];
  alignas(16) float sDelta[2][Config::kStep];
  JaggedTile tile;  // of TilesOfCta
};

// A lane's quarter of one row of O, in registers: every fourth chunk of 8 elements.
template <typename Element, int kDim>
struct OutRows {
  static constexpr int kChunks = kDim / 8 / 4;
  uint4 chunks[kChunks];

  __device__ __forceinline__ void load(const Element* gOut, int columns, int lane) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int column = (i * 4 + lane % 4) * 8;
      chunks[i] = column < columns ? *reinterpret_cast<const uint4*>(gOut + column)
                                   : make_uint4(0, 0, 0, 0);
    }
  }

  // Its product with a row of dO, summed over the four lanes of the quad.
  template <typename Tile>
  __device__ __forceinline__ float dot(Tile& sGradOut, int row, int lane) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 grad_chunk =
          *reinterpret_cast<const uint4*>(sGradOut.chunk(row, i * 4 + lane % 4));
      const Element* grad = reinterpret_cast<const Element*>(&grad_chunk);
      const Element* out = reinterpret_cast<const Element*>(&chunks[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += static_cast<float>(grad[e]) * static_cast<float>(out[e]);
    }
    return quad_sum(sum);
  }
};

// One tile of queries.
template <typename Config>
__device__ __forceinline__ void backward_dq_of_queries(const AttentionBackwardParams& params,
                                                       DqWgmmaStorage<Config>& shared,
                                                       const JaggedTile& tile) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  if (tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kRows, num_queries - row);
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + row;
  if (tile.seq < 0) {
    if (params.split_by_length) return;
    store_zeros<kThreads>(row_of<Element>(params.grad_q, global_row, head),
                          params.grad_q.row_stride, rows, params.dim_qk);
    return;
  }
  const RowRange kv = sequence_rows(params.kv_offsets, tile.seq);
  if (left_to_tiny(params, tile.rows.len, kv.len) || left_to_short(params, tile.rows.len, kv.len) ||
      left_to_long(params, tile.rows.len))
    return;
  const int num_keys = static_cast<int>(kv.len);
  const WindowOf<int> window{num_keys - num_queries, window_rows32(params.window_left),
                             window_rows32(params.window_right)};
  const int last_key = window.last_column(row, rows, num_keys);
  const int first_key = window.first_column(row) / kStep * kStep;

  const auto load_keys = [&](int key, int stage) {
    load_tile<kThreads>(shared.sK[stage], row_of<Element>(params.k, kv.begin + key, kv_head),
                        params.k.row_stride, num_keys - key, params.dim_qk, true);
    load_tile<kThreads>(shared.sV[stage], row_of<Element>(params.v, kv.begin + key, kv_head),
                        params.v.row_stride, num_keys - key, params.dim_v, true);
  };
  load_tile<kThreads>(shared.sQ, row_of<Element>(params.q, global_row, head), params.q.row_stride,
                      rows, params.dim_qk, true);
  load_tile<kThreads>(shared.sGradOut, row_of<Element>(params.grad_out, global_row, head),
                      params.grad_out.row_stride, rows, params.dim_v, true);
  ptx::cp_async_commit();
  if (first_key < last_key) load_keys(first_key, 0);
  ptx::cp_async_commit();

  // lse and delta of the lane's two rows; a row past the end, or one that sees nothing, has P = 0.
  // All that they are made of is asked for before the wait.
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
  float lse_log2[2], delta[2];
  OutRows<Element, kDim> out_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = warp_row + 8 * half + lane / 4;
    const bool valid = own_row < rows;
    const int64_t statistic = (global_row + own_row) * params.heads + head;
    out_rows[half].load(row_of<Element>(params.out, global_row + own_row, head),
                        valid ? params.dim_v : 0, lane);
    lse_log2[half] = valid ? static_cast<const float*>(params.lse)[statistic] * kLog2E : 0.0f;
    delta[half] = valid && params.grad_lse != nullptr
                      ? -static_cast<const float*>(params.grad_lse)[statistic]
                      : 0.0f;
  }
  ptx::cp_async_wait<1>();
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = warp_row + 8 * half + lane / 4;
    delta[half] += out_rows[half].dot(shared.sGradOut, own_row, lane);
    if (own_row < rows && lane % 4 == 0) {
      static_cast<float*>(params.delta)[(global_row + own_row) * params.heads + head] = delta[half];
    }
  }

  Accumulator<1, kOutBlocks> dq = {};
  int stage = 0;
  for (int key = first_key; key < last_key; key += kStep, stage ^= 1) {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncthreads();
    Accumulator<1, kScoreBlocks> s, dp;
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sQ, 0, shared.sK[stage]);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, shared.sGradOut, 0, shared.sV[stage]);
    ptx::wgmma_commit_group();
    if (key + kStep < last_key) load_keys(key + kStep, stage ^ 1);
    ptx::cp_async_commit();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] = ptx::ex2_approx(s[0][block][i] * scale_log2 - lse_log2[i / 2]);
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dp[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][block][i] *= dp[0][block][i] - delta[i / 2];
    }
    if (window.cuts_tile(row, kRows, key, kStep, num_keys)) {
      replace_unseen(s, 0.0f, window, row + warp_row + lane / 4, key, num_keys, lane);
    }
    const PackedRows<Element, kScoreBlocks> ds(s);
    ptx::fence_operands(dq[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dq, ds, shared.sK[stage]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq[0]);
  }
  ptx::cp_async_wait<0>();
  // dq leaves through sQ: each warp overwrites its own 16 rows. Nothing in the manual says that the
  // products of another warp of the warpgroup do not read them, so all must be done first.
  ptx::bar_sync(1, kThreads);
  const float scales[1][2] = {{scale, scale}};
  store_rows(dq, scales, shared.sQ, warp_row, 0, row_of<Element>(params.grad_q, global_row, head),
             params.grad_q.row_stride, rows, params.dim_qk, true, lane);
}

// The tiles of a CTA in slabs, or where params.longer_in_slabs is false by sequence.
template <int kRows>
class LoopedTilesOfCta {
 public:
  __device__ __forceinline__ LoopedTilesOfCta(const AttentionParams& params,
                                              const OffsetsView& offsets)
      : in_slabs_(params.longer_in_slabs), longer_(params, offsets), shorter_(params, offsets) {}
  __device__ __forceinline__ bool next(JaggedTile& tile) {
    return in_slabs_ ? longer_.next(tile) : shorter_.next(tile);
  }

 private:
  bool in_slabs_;
  TilesOfCta<kRows> longer_;
  ShorterTilesOfCta<kRows, kLongBackwardRows> shorter_;
};

// Visits the tiles of a CTA. If kLimit, those of sequences of more rows (kLooped), or of all others.
template <int kRows, bool kLooped, int kLimit, typename Visit>
__device__ __forceinline__ void visit_backward_tiles(const AttentionBackwardParams& params,
                                                     const OffsetsView& offsets,
                                                     JaggedTile& shared_tile, Visit visit) {
  if constexpr (kLooped && kLimit > 0) {
    visit_tiles(LongTilesOfCta<kRows, kLimit>(offsets), shared_tile, visit);
  } else if constexpr (kLooped) {
    if (params.longer_in_slabs && nothing_is_left(params)) return;
    visit_tiles(LoopedTilesOfCta<kRows>(params, offsets), shared_tile, visit);
  } else {
    const JaggedTile tile = find_any_tile<kRows>(offsets, blockIdx.x);
    if (kLimit == 0 || tile.seq < 0 || tile.rows.len <= kLimit) visit(tile);
  }
}

template <typename Config, bool kLooped, int kLimit>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dq_wgmma(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DqWgmmaStorage<Config>*>(wgmma_shared_bytes);
  ptx::griddepcontrol_launch_dependents();
  visit_backward_tiles<Config::kRows, kLooped, kLimit>(
      params, params.q_offsets, shared.tile,
      [&](const JaggedTile& tile) { backward_dq_of_queries<Config>(params, shared, tile); });
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();  // launch_longer
}

// One tile of keys. Without kWaits delta is there.
template <typename Config, bool kWaits>
__device__ __forceinline__ void backward_dkdv_of_keys(const AttentionBackwardParams& params,
                                                      DkdvWgmmaStorage<Config>& shared,
                                                      const JaggedTile& tile) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kRows = Config::kRows, kStep = Config::kStep,
                kThreads = Config::kThreads;
  constexpr int kScoreBlocks = kStep / 8, kOutBlocks = kDim / 8;
  // The tile: `rows` keys from tile.row on; `queries` are the rows of q in the same sequence.
  if (tile.row >= tile.rows.len) return;
  const int row = static_cast<int>(tile.row), num_keys = static_cast<int>(tile.rows.len);
  const int rows = min(kRows, num_keys - row);
  const int kv_head = blockIdx.y, group = params.heads / params.kv_heads;
  const int64_t global_row = tile.rows.begin + row;
  if (tile.seq < 0) {
    if (params.split_by_length) return;
    store_zeros<kThreads>(row_of<Element>(params.grad_k, global_row, kv_head),
                          params.grad_k.row_stride, rows, params.dim_qk);
    store_zeros<kThreads>(row_of<Element>(params.grad_v, global_row, kv_head),
                          params.grad_v.row_stride, rows, params.dim_v);
    return;
  }
  const RowRange queries = sequence_rows(params.q_offsets, tile.seq);
  if (left_to_tiny(params, queries.len, tile.rows.len) ||
      left_to_short(params, queries.len, tile.rows.len) || left_to_long(params, queries.len))
    return;
  const int num_queries = static_cast<int>(queries.len);
  const WindowOf<int> window =
      WindowOf<int>{num_keys - num_queries, window_rows32(params.window_left),
                    window_rows32(params.window_right)}
          .transposed();
  const int last_query = window.last_column(row, rows, num_queries);
  const int first_query = window.first_column(row) / kStep * kStep;

  const auto load_queries = [&](int head, int query, int stage) {
    const int64_t first = queries.begin + query;
    const int valid = num_queries - query;
    load_tile<kThreads>(shared.sQ[stage], row_of<Element>(params.q, first, head),
                        params.q.row_stride, valid, params.dim_qk, true);
    load_tile<kThreads>(shared.sGradOut[stage], row_of<Element>(params.grad_out, first, head),
                        params.grad_out.row_stride, valid, params.dim_v, true);
    for (int r = threadIdx.x; r < kStep; r += kThreads) {
      const int64_t statistic = (first + (r < valid ? r : 0)) * params.heads + head;
      ptx::cp_async_4(&shared.sLse[stage][r], static_cast<const float*>(params.lse) + statistic,
                      r < valid ? 4 : 0);
      ptx::cp_async_4(&shared.sDelta[stage][r], static_cast<const float*>(params.delta) + statistic,
                      r < valid ? 4 : 0);
    }
  };
  int head = kv_head * group;
  const int last_head = head + group;
  load_tile<kThreads>(shared.sK, row_of<Element>(params.k, global_row, kv_head),
                      params.k.row_stride, rows, params.dim_qk, true);
  load_tile<kThreads>(shared.sV, row_of<Element>(params.v, global_row, kv_head),
                      params.v.row_stride, rows, params.dim_v, true);
  ptx::cp_async_commit();
  if (kWaits && !params.dkdv_is_last) ptx::griddepcontrol_wait();  // for delta
  if (first_query < last_query) load_queries(head, first_query, 0);
  ptx::cp_async_commit();

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const float scale = static_cast<float>(params.scale), scale_log2 = scale * kLog2E;
  Accumulator<1, kOutBlocks> dk = {}, dv = {};
  int stage = 0;
  int query = first_query;
  while (query < last_query && head < last_head) {
    int next_head = head;
    int next_query = query + kStep;
    if (next_query >= last_query) {
      next_query = first_query;
      ++next_head;
    }
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncthreads();
    Accumulator<1, kScoreBlocks> s, dp;  // S^T and dP^T
    ptx::wgmma_fence();
    wgmma_rows_by_rows(s, shared.sK, 0, shared.sQ[stage]);
    ptx::wgmma_commit_group();
    wgmma_rows_by_rows(dp, shared.sV, 0, shared.sGradOut[stage]);
    ptx::wgmma_commit_group();
    if (next_head < last_head) load_queries(next_head, next_query, stage ^ 1);
    ptx::cp_async_commit();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      const float2 lse =
          *reinterpret_cast<const float2*>(&shared.sLse[stage][block * 8 + 2 * (lane % 4)]);
      const float lse_log2[2] = {lse.x * kLog2E, lse.y * kLog2E};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] = ptx::ex2_approx(s[0][block][i] * scale_log2 - lse_log2[i % 2]);
    }
    if (window.cuts_tile(row, kRows, query, kStep, num_queries)) {
      replace_unseen(s, 0.0f, window, row + warp_row + lane / 4, query, num_queries, lane);
    }
    const PackedRows<Element, kScoreBlocks> p(s);
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dv, p, shared.sGradOut[stage]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dp[0]);
#pragma unroll
    for (int block = 0; block < kScoreBlocks; ++block) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.sDelta[stage][block * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] *= dp[0][block][i] - (i % 2 == 0 ? delta.x : delta.y);
    }
    const PackedRows<Element, kScoreBlocks> ds(s);
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns(dk, ds, shared.sQ[stage]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
    head = next_head;
    query = next_query;
    stage ^= 1;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // all products are done with K and V, through whose rows the gradients leave
  const float scales[1][2] = {{scale, scale}}, ones[1][2] = {{1.0f, 1.0f}};
  store_rows(dk, scales, shared.sK, warp_row, 0,
             row_of<Element>(params.grad_k, global_row, kv_head), params.grad_k.row_stride, rows,
             params.dim_qk, true, lane);
  store_rows(dv, ones, shared.sV, warp_row, 0, row_of<Element>(params.grad_v, global_row, kv_head),
             params.grad_v.row_stride, rows, params.dim_v, true, lane);
}

template <typename Config, bool kLooped, int kLimit>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_dkdv_wgmma(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(1024) char wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DkdvWgmmaStorage<Config>*>(wgmma_shared_bytes);
  if (kLooped && kLimit > 0) ptx::griddepcontrol_wait();  // the next one finds delta
  ptx::griddepcontrol_launch_dependents();  // the plan of the kernel for long sequences
  visit_backward_tiles<Config::kRows, kLooped, kLimit>(
      params, params.kv_offsets, shared.tile, [&](const JaggedTile& tile) {
        backward_dkdv_of_keys<Config, kLooped || kLimit == 0>(params, shared, tile);
      });
  if (blockIdx.x == 0 && blockIdx.y == 0) ptx::griddepcontrol_wait();
}

template <typename Config, bool kLooped, int kLimit = 0>
cudaError_t launch_dq(const AttentionBackwardParams& params, const Grid& grid,
                      cudaStream_t stream) {
  return launch_longer<backward_dq_wgmma<Config, kLooped, kLimit>>(
      params, params, grid, Config::kThreads, sizeof(DqWgmmaStorage<Config>), stream,
      Config::kName);
}

template <typename Config, bool kLooped, int kLimit = 0>
cudaError_t launch_dkdv(const AttentionBackwardParams& params, const Grid& grid,
                        cudaStream_t stream) {
  return launch_dependent<backward_dkdv_wgmma<Config, kLooped, kLimit>>(
      params, grid, Config::kThreads, sizeof(DkdvWgmmaStorage<Config>), stream);
}

// A grid for ShorterTilesOfCta.
inline Grid shorter_grid(const OffsetsView& offsets, int tile_rows, int heads) {
  constexpr int64_t kManyCtas = 4224;
  const int64_t tiles = offsets.num_seqs * ((kLongBackwardRows + tile_rows - 1) / tile_rows),
                enough = (kManyCtas + heads - 1) / heads;
  return {tiles < enough ? tiles : enough, heads};
}

template <typename Element, int kDim, int kStep, bool kLooped>
cudaError_t launch_backward_step(const AttentionBackwardParams& params, BackwardPart part,
                                 cudaStream_t stream) {
  using Dq = DqWgmmaConfig<Element, kDim, kStep>;
  using Dkdv = DkdvWgmmaConfig<Element, kDim, kStep>;
  const auto grid = [&](const OffsetsView& offsets, int tile_rows, int heads) {
    return kLooped && !params.longer_in_slabs ? shorter_grid(offsets, tile_rows, heads)
                                              : looped_grid(params, offsets, tile_rows, heads);
  };
  cudaError_t error = cudaSuccess;
  if (part != BackwardPart::kDkdv)
    error = launch_dq<Dq, kLooped>(params, grid(params.q_offsets, Dq::kRows, params.heads), stream);
  if (error != cudaSuccess || part == BackwardPart::kDq) return error;
  return launch_dkdv<Dkdv, kLooped>(params, grid(params.kv_offsets, Dkdv::kRows, params.kv_heads),
                                    stream);
}

// Whether long sequences hide among short ones, in self-attention of head dims up to 32, where no other
// kernel takes them: then they have launches of their own, with large steps. Where nobody says so, only
// if there is so much to do that to look for them, in all CTAs, takes little of it.
inline bool hides_long(const AttentionBackwardParams& params) {
  constexpr int64_t kManyRows = int64_t{1} << 20;  // of all heads
  return dim_bucket(params) == 32 && !params.longer_in_slabs && !has_long_sequences(params) &&
         params.q_offsets.data == params.kv_offsets.data &&
         (params.max_len == 0 ? params.q_offsets.total >= kManyRows / params.heads
                              : params.max_len > kLongBackwardRows);
}

// dq of long ones, of others, dk and dv of long ones, which waits for both, and of others beside it.
template <typename Element>
cudaError_t launch_backward_with_long(const AttentionBackwardParams& params, cudaStream_t stream) {
  constexpr int kLimit = kLongBackwardRows, kRows = 64;
  constexpr int64_t kCtas = 528;
  const auto long_grid = [](int heads) { return Grid{(kCtas + heads - 1) / heads, heads}; };
  const auto grid = [&](int heads) { return tile_grid(params, params.q_offsets, kRows, heads); };
  cudaError_t error = launch_dq<DqWgmmaConfig<Element, 32, 64>, true, kLimit>(
      params, long_grid(params.heads), stream);
  if (error == cudaSuccess)
    error = launch_dq<DqWgmmaConfig<Element, 32, 32>, false, kLimit>(params, grid(params.heads),
                                                                     stream);
  if (error == cudaSuccess)
    error = launch_dkdv<DkdvWgmmaConfig<Element, 32, 64>, true, kLimit>(
        params, long_grid(params.kv_heads), stream);
  if (error == cudaSuccess)
    error = launch_dkdv<DkdvWgmmaConfig<Element, 32, 32>, false, kLimit>(
        params, grid(params.kv_heads), stream);
  return error;
}

template <typename Element>
cudaError_t launch_backward_wgmma(const AttentionBackwardParams& params, BackwardPart part,
                                  cudaStream_t stream) {
  return for_dim<128>(params, [&](auto dim) {
    constexpr int kShortStep = dim.value <= 64 ? 32 : 64;
    if (params.longer_in_slabs) {
      // Others than short ones are rare, and have most of the work if there are any.
      const bool any_longer = params.max_len == 0 || params.max_len > kShortRows;
      return any_longer && (dim.value == 32 || params.short_apart)
                 ? launch_backward_step<Element, dim.value, 64, true>(params, part, stream)
                 : launch_backward_step<Element, dim.value, kShortStep, true>(params, part, stream);
    }
    if constexpr (dim.value == 32) {
      if (part == BackwardPart::kAll && hides_long(params))
        return launch_backward_with_long<Element>(params, stream);
    }
    if constexpr (dim.value > 32) {
      if (most_are_long(params))
        return launch_backward_step<Element, dim.value, 64, true>(params, part, stream);
    }
    if constexpr (dim.value == 128) {
      return launch_backward_bulk<Element>(params, part, stream);
    } else {
      if (!has_long_sequences(params))
        return launch_backward_step<Element, dim.value, kShortStep, false>(params, part, stream);
      return launch_backward_step<Element, dim.value, 64, false>(params, part, stream);
    }
  });
}

}  // namespace jagged_cuda::attention
