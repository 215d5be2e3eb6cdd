// The workspaces of the backward kernel for long sequences (long_backward.cuh), and the kernels
// before and behind it, which fill and empty them:
//     statistics   lse and delta of a step's queries: prepare_long writes them
//     sums         dQ of a step, in f32: finish_long rounds them to dQ; prepare_long clears them where
//                  no tile of keys stores before the others add
//     tickets      prepare_long clears them; kOrdered: how many tiles of keys have added to a part of
//                  the sums; else how many warps have stored their part of the first tile's, one for each
//                  sequence and kv head
// Grid of both kernels: x = CTAs that share the tiles of long sequences, y = heads.
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/long_plan.cuh"

#include <cmath>

namespace jagged_cuda::attention {

template <typename Config>
struct LongWorkspace {
  static constexpr int kChunk = 16 * 64;                     // floats that a warp holds of dQ,
  static constexpr int kPart = 4 * kChunk;                   // a warpgroup,
  static constexpr int kSums = Config::kWarpgroups * kPart;  // and all of one step and head
  static_assert(kSums == Config::kStep * Config::kDim);

  // The first unit of a sequence that begins at row `begin`.
  __device__ __forceinline__ static int first_unit(const AttentionBackwardParams& params,
                                                   int64_t begin, int64_t seq) {
    return static_cast<int>(long_unit<Config::kStep>(params, begin, seq));
  }
  // The step, in the workspaces, that holds row `row` of a sequence that begins at such a unit, and
  // head.
  __device__ __forceinline__ static int64_t step(const AttentionBackwardParams& params,
                                                 int first_unit, int row, int head) {
    return static_cast<int64_t>(first_unit + row / Config::kStep) * params.heads + head;
  }

  // lse and delta of its queries, one after the other, in the order of statistics_place().
  __device__ __forceinline__ static float* statistics(const AttentionBackwardParams& params,
                                                      int64_t step) {
    return params.long_statistics + step * (2 * Config::kStep);
  }
  // The pairs of queries that a lane has as columns of two blocks of scores, side by side.
  __device__ __forceinline__ static int statistics_place(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }
  // A warpgroup's part of its dQ.
  __device__ __forceinline__ static float* grad_q(const AttentionBackwardParams& params,
                                                  int64_t step, int warpgroup) {
    return params.long_grad_q + step * kSums + warpgroup * kPart;
  }
  __device__ __forceinline__ static int* ticket(const AttentionBackwardParams& params, int64_t step,
                                                int warpgroup) {
    return params.long_tickets + step * Config::kWarpgroups + warpgroup;
  }
  // Without an order: one for the tiles of keys of a sequence and kv head.
  template <typename Item>
  __device__ __forceinline__ static int* item_ticket(const AttentionBackwardParams& params,
                                                     const Item& item) {
    const int head = item.kv_head * (params.heads / params.kv_heads);
    return ticket(params, step(params, item.first_unit, 0, head), 0);
  }
};

// Which tiles of keys see some of the queries of the step at row `row`: exactly those in whose
// StepRange it is.
template <int kTileN, int kStep>
struct TileRange {
  int first;
  int last;  // first if there are none

  __device__ __forceinline__ TileRange(const WindowOf<int>& window, int row, int num_keys) {
    const int first_key = window.first_column(row),
              last_key = window.last_column(row, kStep, num_keys);
    first = first_key / kTileN;
    last = last_key > first_key ? (last_key + kTileN - 1) / kTileN : first;
  }
};

// --- the kernels before and behind: tiles of kPreparedRows queries of one head

constexpr int kPreparedRows = 128, kPrepareThreads = 256;

// Whether of each sequence and head the first tile of keys stores dQ, and the others add to it: where
// first tiles alone keep the GPU busy, so that others need not wait. Known once there is a plan.
constexpr int kManyFirstTiles = 128;
template <typename Config>
__device__ __forceinline__ bool first_tile_stores(const AttentionBackwardParams& params) {
  if (Config::kOrdered || params.long_tickets == nullptr) return false;
  const int num_sequences = __ldcg(&static_cast<const LongPlan*>(params.long_plan)->num_sequences);
  return int64_t{num_sequences} * params.kv_heads >= kManyFirstTiles;
}

// Zeros for the sums of a tile of kPreparedRows queries.
template <typename Config>
__device__ __forceinline__ void clear_sums(const AttentionBackwardParams& params,
                                           const JaggedTile& tile) {
  using Workspace = LongWorkspace<Config>;
  const int rows = static_cast<int>(min(int64_t{kPreparedRows}, tile.rows.len - tile.row)),
            steps = (rows + Config::kStep - 1) / Config::kStep, head = blockIdx.y,
            first_unit = Workspace::first_unit(params, tile.rows.begin, tile.seq);
  for (int index = threadIdx.x; index < steps * (Workspace::kSums / 4); index += kPrepareThreads) {
    const int row = static_cast<int>(tile.row) + index / (Workspace::kSums / 4) * Config::kStep;
    float* sums = Workspace::grad_q(params, Workspace::step(params, first_unit, row, head),
                                    /*warpgroup=*/0);
    ptx::st_global_16(sums + index % (Workspace::kSums / 4) * 4, make_uint4(0, 0, 0, 0));
  }
}

// Zeros for dQ of the queries of a tile that no key sees: they are in no step.
template <typename Config>
__device__ __forceinline__ void zero_unseen_queries(const AttentionBackwardParams& params,
                                                    const JaggedTile& tile, int rows, int head) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kDim / 8, kRowStep = kPrepareThreads / kChunks;
  const int first_row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int chunk = threadIdx.x % kChunks, own_row = static_cast<int>(threadIdx.x) / kChunks;
  const int num_keys = keys_of(params, tile.seq, num_queries);
  const WindowOf<int> window = sequence_window(params, num_keys - num_queries);
#pragma unroll 1
  for (int first = 0; first < rows; first += Config::kStep) {
    const TileRange<Config::kTileN, Config::kStep> tiles(window, first_row + first, num_keys);
    if (tiles.first < tiles.last) continue;
    const int last = min(rows, first + Config::kStep);
    for (int row = first + own_row; row < last; row += kRowStep) {
      if (chunk * 8 < params.dim_qk)
        ptx::st_global_16(
            row_of<Element>(params.grad_q, tile.rows.begin + first_row + row, head) + chunk * 8,
            make_uint4(0, 0, 0, 0));
    }
  }
}

// lse, in units of log2, and delta of a tile: a thread multiplies one chunk of O by that of dO for
// every kRowStep-th row. All that it needs is asked for first.
template <typename Config>
__device__ __forceinline__ void prepare_tile(const AttentionBackwardParams& params,
                                             const JaggedTile& tile) {
  using Element = typename Config::Element;
  using Workspace = LongWorkspace<Config>;
  constexpr int kChunks = Config::kDim / 8, kRowStep = kPrepareThreads / kChunks,
                kRows = kPreparedRows / kRowStep;
  const int first_row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kPreparedRows, num_queries - first_row), head = blockIdx.y;
  const int chunk = threadIdx.x % kChunks, own_row = static_cast<int>(threadIdx.x) / kChunks;
  const bool has_chunk = chunk * 8 < params.dim_v;
  // Of the rows that share their chunks one belongs to each of kRows lanes.
  static_assert(kRows <= kChunks);
  const int lane_row = own_row + chunk * kRowStep;
  const bool has_row = chunk < kRows && lane_row < rows;
  const int64_t statistic =
      (tile.rows.begin + first_row + (has_row ? lane_row : 0)) * params.heads + head;
  const float lse = has_row ? static_cast<const float*>(params.lse)[statistic] : -INFINITY,
              grad_lse = has_row && params.grad_lse != nullptr
                             ? static_cast<const float*>(params.grad_lse)[statistic]
                             : 0.0f;
  uint4 out[kRows], grad_out[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = own_row + i * kRowStep;
    const bool valid = has_chunk && row < rows;
    const int64_t global_row = tile.rows.begin + first_row + (valid ? row : 0);
    out[i] = ptx::ld_global_nc_16(row_of<Element>(params.out, global_row, head) + chunk * 8, valid);
    grad_out[i] =
        ptx::ld_global_nc_16(row_of<Element>(params.grad_out, global_row, head) + chunk * 8, valid);
  }
  if constexpr (Config::kOrdered) zero_unseen_queries<Config>(params, tile, rows, head);
  float lane_delta = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float delta = 0.0f;
    const Element* a = reinterpret_cast<const Element*>(&out[i]);
    const Element* b = reinterpret_cast<const Element*>(&grad_out[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) delta += to_sum(a[e]) * to_sum(b[e]);
#pragma unroll
    for (int lanes = 1; lanes < kChunks; lanes *= 2)
      delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
    if (chunk == i) lane_delta = delta;
  }
  const int step_rows = (rows + Config::kStep - 1) / Config::kStep * Config::kStep;
  if (chunk >= kRows || lane_row >= step_rows) return;
  const int first_unit = Workspace::first_unit(params, tile.rows.begin, tile.seq);
  float* statistics = Workspace::statistics(
                          params, Workspace::step(params, first_unit, first_row + lane_row, head)) +
                      Workspace::statistics_place(lane_row % Config::kStep);
  // Rows past the end, and rows that see nothing, have lse inf.
  statistics[0] = lse == -INFINITY ? INFINITY : lse * kLog2E;
  statistics[Config::kStep] = lane_delta - grad_lse;
}

// The sums, rounded, to dQ.
template <typename Config>
__device__ __forceinline__ void finish_tile(const AttentionBackwardParams& params,
                                            const JaggedTile& tile) {
  using Element = typename Config::Element;
  using Workspace = LongWorkspace<Config>;
  constexpr int kChunks = Config::kDim / 64, kUnits = kPreparedRows / 16 * kChunks;
  const int first_row = static_cast<int>(tile.row), num_queries = static_cast<int>(tile.rows.len);
  const int rows = min(kPreparedRows, num_queries - first_row), head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = static_cast<float>(params.scale), scales[2] = {scale, scale};
  const int first_unit = Workspace::first_unit(params, tile.rows.begin, tile.seq);
#pragma unroll
  for (int unit = warp; unit < kUnits; unit += kPrepareThreads / 32) {
    const int row = unit / kChunks * 16, column = unit % kChunks;
    if (row >= rows) continue;
    // At 128 dims a warpgroup has half of the columns, at 64 half of the queries.
    const int chunk = column * 4 + row % Config::kStep / 16;
    const float* source =
        Workspace::grad_q(params, Workspace::step(params, first_unit, first_row + row, head), 0) +
        chunk * Workspace::kChunk + lane * 4;
    Accumulator<1, 8> dq;
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      const float4 sums = __ldcs(reinterpret_cast<const float4*>(source + block * 128));
      dq[0][block][0] = sums.x;
      dq[0][block][1] = sums.y;
      dq[0][block][2] = sums.z;
      dq[0][block][3] = sums.w;
    }
    store_quads(dq, scales,
                row_of<Element>(params.grad_q, tile.rows.begin + first_row + row + lane / 4, head) +
                    column * 64,
                params.grad_q.row_stride, rows - row - lane / 4, params.dim_qk - column * 64, lane);
  }
}

// The tiles of long sequences, of which this CTA takes every gridDim.x-th. Each lane of a warp looks for one
// of the next 32.
class PreparedTiles {
 public:
  __device__ __forceinline__ explicit PreparedTiles(const AttentionBackwardParams& params)
      : params_(params),
        count_(num_longer_tiles(params.q_offsets.total, kPreparedRows)),
        first_(blockIdx.x) {}

  // False if there are no more.
  __device__ __forceinline__ bool next() {
    constexpr unsigned kAll = 0xffffffffu;
    while (left_ == 0) {
      if (first_ >= count_) return false;
      look();
    }
    const int source = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    tile_.seq = __shfl_sync(kAll, found_.seq, source);
    tile_.row = __shfl_sync(kAll, found_.row, source);
    tile_.rows.begin = __shfl_sync(kAll, found_.rows.begin, source);
    tile_.rows.len = __shfl_sync(kAll, found_.rows.len, source);
    return true;
  }
  __device__ __forceinline__ const JaggedTile& tile() const { return tile_; }

 private:
  __device__ __forceinline__ void look() {
    const int64_t own = first_ + int64_t{threadIdx.x % 32} * gridDim.x;
    found_ = {-1, {0, 0}, 0};
    if (own < count_)
      found_ = find_longer_tile_of_lane<kPreparedRows>(params_.q_offsets, kPreparedRows, own);
    left_ = __ballot_sync(0xffffffffu, found_.seq >= 0 && found_.row < found_.rows.len &&
                                           left_to_long(params_, found_.rows.len));
    first_ += int64_t{32} * gridDim.x;
  }

  const AttentionBackwardParams& params_;
  const int64_t count_;
  int64_t first_;      // of those to look for next
  unsigned left_ = 0;  // lanes whose tile is still to come
  JaggedTile found_, tile_;
};

__device__ __forceinline__ bool plans_any(const AttentionBackwardParams& params) {
  return __ldcg(&static_cast<const LongPlan*>(params.long_plan)->num_sequences) > 0;
}

template <typename Config>
__global__ __launch_bounds__(kPrepareThreads) void prepare_long(
    const __grid_constant__ AttentionBackwardParams params) {
  ptx::griddepcontrol_launch_dependents();
  for (PreparedTiles tiles(params); tiles.next();) prepare_tile<Config>(params, tiles.tile());
  ptx::griddepcontrol_wait();  // for the plan
  if (!plans_any(params)) return;
  if (Config::kOrdered || first_tile_stores<Config>(params)) {
    // All tickets, whatever the offsets say: one that is not cleared could be waited for in vain.
    const int64_t tickets = num_long_tickets(params);
    for (int64_t index =
             (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * kPrepareThreads + threadIdx.x;
         index < tickets; index += int64_t{gridDim.x} * gridDim.y * kPrepareThreads)
      params.long_tickets[index] = 0;
  } else {
    for (PreparedTiles tiles(params); tiles.next();) clear_sums<Config>(params, tiles.tile());
  }
}

template <typename Config>
__global__ __launch_bounds__(kPrepareThreads) void finish_long(
    const __grid_constant__ AttentionBackwardParams params) {
  if (params.dkdv_is_last) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (!plans_any(params)) return;
  for (PreparedTiles tiles(params); tiles.next();) finish_tile<Config>(params, tiles.tile());
}

}  // namespace jagged_cuda::attention
