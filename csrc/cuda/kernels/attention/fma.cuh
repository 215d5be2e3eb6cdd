// jagged_flash_attention on plain FMA, f32 and f64: forward, and backward as two kernels (dq; dk
// and dv).
//
// The mathematics, grid and order of the kernels are those of forward_mma_sync.cuh and
// backward_mma_sync.cuh. Operands are summed in their own precision, without TF32.
//
// Mapping: 16 x 16 threads; thread (x, y) owns scores (y + 16 i, x + 16 j), i, j < kPerThread, of a
// square tile, and of an output row the columns x + 16 c. Row statistics are combined over the 16
// lanes of a half-warp.
//
// Shared memory: operand tiles of kTile rows with one element of padding, so that 16 rows at one
// column lie in 16 banks, and one tile of probabilities: at most 152 KiB (f32, kDim 128,
// backward).
//
// Barriers: __syncthreads before tiles are overwritten, after they are written, and around each use
// of the probabilities' tile.
#pragma once

#include "cuda/kernels/attention/bias.cuh"
#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/ranges.cuh"
#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/attention/table_sums.cuh"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/element.cuh"

#include <cfloat>
#include <cmath>

namespace jagged_cuda::attention {

template <typename T_, int kDim_>
struct FmaConfig {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kSide = 16;
  static constexpr int kThreads = kSide * kSide;
  // As many rows as four operand tiles leave room for in 163 KiB.
  static constexpr int kPerThread = (sizeof(T) == 4 ? 4 : 2) / (kDim <= 128 ? 1 : 2);
  static constexpr int kTile = kSide * kPerThread;
  static constexpr int kOutPerThread = kDim / kSide;
  static constexpr int kPitch = kDim + 1;
};

template <typename Config>
struct FmaForwardStorage {
  using T = typename Config::T;
  T sQ[Config::kTile][Config::kPitch];
  T sK[Config::kTile][Config::kPitch];
  T sV[Config::kTile][Config::kPitch];
  T sP[Config::kTile][Config::kTile + 1];
};

// Of a row all of whose keys a bias hides: their P is 0 then. Likewise below -kMostLse in f32, with a
// bias: without one, a key that stands out at such a size still has its P of 1.
template <typename T>
__device__ __forceinline__ T finite_lse(const AttentionParams& params, int64_t statistic) {
  const T lse = static_cast<const T*>(params.lse)[statistic],
          least = sizeof(T) == 4 ? (params.bias.any() ? T(-kMostLse) : T(-FLT_MAX)) : T(-DBL_MAX);
  return lse < least ? T(0) : lse;
}

template <typename Config>
struct FmaBackwardStorage : FmaForwardStorage<Config> {
  typename Config::T sGradOut[Config::kTile][Config::kPitch];
};

template <typename Config>
using ScoreTile = typename Config::T[Config::kPerThread][Config::kPerThread];
template <typename Config>
using OutTile = typename Config::T[Config::kPerThread][Config::kOutPerThread];

// Over the 16 lanes that share a row.
template <typename T>
__device__ __forceinline__ T row_sum(T value) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
template <typename T>
__device__ __forceinline__ T row_max(T value) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = value > other ? value : other;
  }
  return value;
}

// What lies outside rows and columns becomes 0.
template <typename Config>
__device__ __forceinline__ void load_operand(
    typename Config::T (&tile)[Config::kTile][Config::kPitch], const HeadsView& view,
    int64_t first_row, int head, int64_t rows, int columns) {
  const auto* g = static_cast<const typename Config::T*>(view.data) + first_row * view.row_stride +
                  head * view.head_stride;
  for (int index = threadIdx.x; index < Config::kTile * Config::kDim; index += Config::kThreads) {
    const int row = index / Config::kDim, column = index % Config::kDim;
    tile[row][column] =
        row < rows && column < columns ? g[row * view.row_stride + column] : typename Config::T(0);
  }
}

// s = a b^T
template <typename Config>
__device__ __forceinline__ void scores(ScoreTile<Config>& s,
                                       const typename Config::T (&a)[Config::kTile][Config::kPitch],
                                       const typename Config::T (&b)[Config::kTile][Config::kPitch],
                                       int x, int y) {
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kPerThread; ++j) s[i][j] = 0;
  }
#pragma unroll 4
  for (int d = 0; d < Config::kDim; ++d) {
    typename Config::T column[Config::kPerThread];
#pragma unroll
    for (int j = 0; j < Config::kPerThread; ++j) column[j] = b[x + Config::kSide * j][d];
#pragma unroll
    for (int i = 0; i < Config::kPerThread; ++i) {
      const typename Config::T row = a[y + Config::kSide * i][d];
#pragma unroll
      for (int j = 0; j < Config::kPerThread; ++j) s[i][j] += row * column[j];
    }
  }
}

// Puts p where all threads can read it, between two barriers, and adds p b to o.
template <typename Config>
__device__ __forceinline__ void accumulate(
    OutTile<Config>& o, const ScoreTile<Config>& p,
    typename Config::T (&sP)[Config::kTile][Config::kTile + 1],
    const typename Config::T (&b)[Config::kTile][Config::kPitch], int x, int y) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kPerThread; ++j)
      sP[y + Config::kSide * i][x + Config::kSide * j] = p[i][j];
  }
  __syncthreads();
#pragma unroll 2
  for (int j = 0; j < Config::kTile; ++j) {
    typename Config::T row[Config::kPerThread];
#pragma unroll
    for (int i = 0; i < Config::kPerThread; ++i) row[i] = sP[y + Config::kSide * i][j];
#pragma unroll
    for (int c = 0; c < Config::kOutPerThread; ++c) {
      const typename Config::T column = b[j][x + Config::kSide * c];
#pragma unroll
      for (int i = 0; i < Config::kPerThread; ++i) o[i][c] += row[i] * column;
    }
  }
}

template <typename Config>
__device__ __forceinline__ void store_result(const OutTile<Config>& o,
                                             const typename Config::T (&scale)[Config::kPerThread],
                                             const HeadsView& view, int64_t first_row, int head,
                                             int64_t rows, int columns, int x, int y) {
  auto* g = static_cast<typename Config::T*>(view.data) + first_row * view.row_stride +
            head * view.head_stride;
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
    const int row = y + Config::kSide * i;
#pragma unroll
    for (int c = 0; c < Config::kOutPerThread; ++c) {
      const int column = x + Config::kSide * c;
      if (row < rows && column < columns) g[row * view.row_stride + column] = o[i][c] * scale[i];
    }
  }
}

// What the query `row` of a tile sees of the keys [key, key + columns).
struct SeenKeys {
  VisibleColumns visible;
  int64_t key;
  bool ranged;
  RowRanges ranges;

  __device__ __forceinline__ SeenKeys(const AttentionParams& params, const Window& window,
                                      const JaggedTile& tile, int row, int64_t first, int columns,
                                      int64_t num_keys)
      : visible(window, tile.row + row, first, columns, num_keys),
        key(first),
        ranged(params.key_ranges != nullptr) {
    if (ranged) ranges = RowRanges(params, tile.rows.begin + tile.row + row);
  }

  __device__ __forceinline__ bool contains(int column) const {
    return visible.contains(column) && (!ranged || ranges.contains(key + column));
  }
};

// Calls visit(s[i][j], i, j) for one score after another. The loop over 16 of them stays one, at the
// first place of registers that move on: unrolled, with what a bucket takes for every score, it was most
// of a kernel.
template <typename Config, typename Visit>
__device__ __forceinline__ void for_each_in_turn(ScoreTile<Config>& s, Visit visit) {
  constexpr int kEach = Config::kPerThread, kScores = kEach * kEach;
#pragma unroll kScores> 4 ? 1 : kScores
  for (int n = 0; n < kScores; ++n) {
    visit(s[0][0], n / kEach, n % kEach);
    const typename Config::T first = s[0][0];
#pragma unroll
    for (int m = 1; m < kScores; ++m) {
      s[(m - 1) / kEach][(m - 1) % kEach] = s[m / kEach][m % kEach];
    }
    s[kEach - 1][kEach - 1] = first;
  }
}

// Scores become logits: scale s[i][j] and, where there are biases, bias_of(i, j).
template <typename Config, typename BiasOf>
__device__ __forceinline__ void add_biases(ScoreTile<Config>& s, typename Config::T scale, bool any,
                                           BiasOf bias_of) {
  using T = typename Config::T;
  if (any) {
    for_each_in_turn<Config>(
        s, [&](T& score, int i, int j) { score = fma(score, scale, bias_of(i, j)); });
    return;
  }
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kPerThread; ++j) s[i][j] *= scale;
  }
}

// Rows are queries from `row` on, of which the tile has `rows`, columns are keys from `key` on, out of
// `keys`.
template <typename Config>
__device__ __forceinline__ void add_biases(ScoreTile<Config>& s, typename Config::T scale,
                                           const HeadBias<typename Config::T>& bias, int64_t row,
                                           int rows, int64_t key, int64_t keys, int x, int y) {
  add_biases<Config>(s, scale, bias.any, [&](int i, int j) {
    return bias.of(row + min(y + Config::kSide * i, rows - 1),
                   min(key + x + Config::kSide * j, keys - 1));
  });
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void forward_fma(
    const __grid_constant__ AttentionParams params) {
  using T = typename Config::T;
  constexpr int kTile = Config::kTile, kPerThread = Config::kPerThread;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<FmaForwardStorage<Config>*>(shared_bytes);
  const int x = threadIdx.x % Config::kSide, y = threadIdx.x / Config::kSide;

  const JaggedTile tile = find_tile<kTile>(params.q_offsets, blockIdx.x);
  const int64_t rows = tile.rows.len - tile.row;
  if (rows <= 0) return;
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  const RowRange kv = tile.seq < 0 ? RowRange{0, 0} : used_rows(params, tile.seq);
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const int tile_rows = static_cast<int>(min(rows, int64_t{kTile}));
  const KeySteps<kTile, true> steps(params, window, tile, tile_rows, kv.len);
  const HeadBias<T> bias(params, head, tile.rows, kv);

  const T scale = static_cast<T>(params.scale);
  OutTile<Config> o = {};
  T maximum[kPerThread], sum[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    maximum[i] = -INFINITY;
    sum[i] = 0;
  }
  if (tile.seq >= 0)
    load_operand<Config>(shared.sQ, params.q, global_row, head, rows, params.dim_qk);
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key)) {
    __syncthreads();
    load_operand<Config>(shared.sK, params.k, kv.begin + key, kv_head, kv.len - key, params.dim_qk);
    load_operand<Config>(shared.sV, params.v, kv.begin + key, kv_head, kv.len - key, params.dim_v);
    __syncthreads();
    ScoreTile<Config> s;
    scores<Config>(s, shared.sQ, shared.sK, x, y);
    add_biases<Config>(s, scale, bias, tile.row, tile_rows, key, kv.len, x, y);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = y + Config::kSide * i;
      const SeenKeys seen(params, window, tile, min(row, tile_rows - 1), key, kTile, kv.len);
      if (params.silu) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          const T z = s[i][j];
          s[i][j] = seen.contains(x + Config::kSide * j) ? z * precise_sigmoid(z) : T(0);
        }
        continue;
      }
      T tile_max = -INFINITY;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        s[i][j] = seen.contains(x + Config::kSide * j) ? s[i][j] : T(-INFINITY);
        tile_max = s[i][j] > tile_max ? s[i][j] : tile_max;
      }
      tile_max = row_max(tile_max);
      const T new_max = tile_max > maximum[i] ? tile_max : maximum[i];
      const T shift = new_max == T(-INFINITY) ? T(0) : new_max;  // -inf - -inf would be NaN
      const T rescale = exp(maximum[i] - shift);
      maximum[i] = new_max;
      T tile_sum = 0;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        s[i][j] = exp(s[i][j] - shift);
        tile_sum += s[i][j];
      }
      sum[i] = sum[i] * rescale + row_sum(tile_sum);
#pragma unroll
      for (int c = 0; c < Config::kOutPerThread; ++c) o[i][c] *= rescale;
    }
    accumulate<Config>(o, s, shared.sP, shared.sV, x, y);
  }
  T inverse_sum[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    inverse_sum[i] = sum[i] == T(0) ? T(0) : T(1) / sum[i];
    const int row = y + Config::kSide * i;
    if (params.silu) {
      inverse_sum[i] =
          tile.seq < 0 ? T(0) : row_weight<T>(params, global_row + min(row, tile_rows - 1), kv.len);
      continue;
    }
    if (x == 0 && row < rows) {
      static_cast<T*>(params.lse)[(global_row + row) * params.heads + head] =
          sum[i] == T(0) ? T(-INFINITY) : maximum[i] + log(sum[i]);
    }
  }
  store_result<Config>(o, inverse_sum, params.out, global_row, head, rows, params.dim_v, x, y);
}

// With kTables dS goes to tables in place of dQ.
template <typename Config, bool kTables>
__device__ __forceinline__ void backward_dq_of_tile(const AttentionBackwardParams& params,
                                                    FmaBackwardStorage<Config>& shared,
                                                    const JaggedTile& tile) {
  using T = typename Config::T;
  constexpr int kTile = Config::kTile, kPerThread = Config::kPerThread;
  const int x = threadIdx.x % Config::kSide, y = threadIdx.x / Config::kSide;

  const int64_t rows = tile.rows.len - tile.row;
  if (rows <= 0) return;
  const int head = blockIdx.y, kv_head = head / (params.heads / params.kv_heads);
  const int64_t global_row = tile.rows.begin + tile.row;
  const RowRange kv = tile.seq < 0 ? RowRange{0, 0} : used_rows(params, tile.seq);
  const Window window{kv.len - tile.rows.len, params.window_left, params.window_right};
  const int tile_rows = static_cast<int>(min(rows, int64_t{kTile}));
  const KeySteps<kTile, true> steps(params, window, tile, tile_rows, kv.len);
  const HeadBias<T> bias(params, head, tile.rows, kv);
  TableSums<T> sums(params, blockIdx.x * (Config::kThreads / 32) + threadIdx.x / 32, head);

  const T scale = static_cast<T>(params.scale);
  OutTile<Config> dq = {};
  T lse[kPerThread] = {}, delta[kPerThread] = {};
  if (tile.seq >= 0) {
    load_operand<Config>(shared.sQ, params.q, global_row, head, rows, params.dim_qk);
    load_operand<Config>(shared.sGradOut, params.grad_out, global_row, head, rows, params.dim_v);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = y + Config::kSide * i;
      const bool valid = row < rows;
      const int64_t statistic = (global_row + (valid ? row : 0)) * params.heads + head;
      if (params.silu) {
        delta[i] = row_weight<T>(params, global_row + (valid ? row : 0), kv.len);
        if (!kTables && valid && x == 0) static_cast<T*>(params.delta)[statistic] = delta[i];
        continue;
      }
      const T* gOut = static_cast<const T*>(params.out.data) +
                      (global_row + (valid ? row : 0)) * params.out.row_stride +
                      head * params.out.head_stride;
      T dot = 0;
      for (int column = x; column < params.dim_v; column += Config::kSide)
        dot += shared.sGradOut[row][column] * gOut[column];
      delta[i] = row_sum(dot);
      if (!valid) continue;
      lse[i] = finite_lse<T>(params, statistic);
      if (params.grad_lse != nullptr) delta[i] -= static_cast<const T*>(params.grad_lse)[statistic];
      if (!kTables && x == 0) static_cast<T*>(params.delta)[statistic] = delta[i];
    }
  }
  for (int64_t key = steps.first; key < steps.last; key = steps.next(key)) {
    __syncthreads();
    load_operand<Config>(shared.sK, params.k, kv.begin + key, kv_head, kv.len - key, params.dim_qk);
    load_operand<Config>(shared.sV, params.v, kv.begin + key, kv_head, kv.len - key, params.dim_v);
    __syncthreads();
    ScoreTile<Config> s, dp;
    scores<Config>(s, shared.sQ, shared.sK, x, y);
    scores<Config>(dp, shared.sGradOut, shared.sV, x, y);
    add_biases<Config>(s, scale, bias, tile.row, tile_rows, key, kv.len, x, y);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = y + Config::kSide * i;
      const SeenKeys seen(params, window, tile, min(row, tile_rows - 1), key, kTile, kv.len);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const T z = s[i][j];
        const T ds = params.silu ? delta[i] * silu_slope(z, precise_sigmoid(z)) * dp[i][j]
                                 : exp(z - lse[i]) * (dp[i][j] - delta[i]);
        s[i][j] = row < rows && seen.contains(x + Config::kSide * j) ? ds : T(0);
      }
    }
    if constexpr (kTables) {
      for_each_in_turn<Config>(s, [&](T ds, int i, int j) {
        sums.add(bias, tile.row + min(y + Config::kSide * i, tile_rows - 1),
                 min(key + x + Config::kSide * j, kv.len - 1), ds);
      });
    } else {
      accumulate<Config>(dq, s, shared.sP, shared.sK, x, y);
    }
  }
  if constexpr (!kTables) {
    T scales[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) scales[i] = scale;
    store_result<Config>(dq, scales, params.grad_q, global_row, head, rows, params.dim_qk, x, y);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void backward_dq_fma(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(128) char shared_bytes[];
  backward_dq_of_tile<Config, false>(params,
                                     *reinterpret_cast<FmaBackwardStorage<Config>*>(shared_bytes),
                                     find_tile<Config::kTile>(params.q_offsets, blockIdx.x));
}

// Grid: x = params.table_ctas, y = heads.
template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void table_gradients_fma(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(128) char shared_bytes[];
  const int64_t tiles = params.q_offsets.total / Config::kTile + params.q_offsets.num_seqs + 2;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    backward_dq_of_tile<Config, true>(params,
                                      *reinterpret_cast<FmaBackwardStorage<Config>*>(shared_bytes),
                                      find_tile<Config::kTile>(params.q_offsets, index));
    __syncthreads();  // the next tile overwrites this one's operands
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void backward_dkdv_fma(
    const __grid_constant__ AttentionBackwardParams params) {
  using T = typename Config::T;
  constexpr int kTile = Config::kTile, kPerThread = Config::kPerThread;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<FmaBackwardStorage<Config>*>(shared_bytes);
  const int x = threadIdx.x % Config::kSide, y = threadIdx.x / Config::kSide;

  const JaggedTile tile = find_tile<kTile>(params.kv_offsets, blockIdx.x);
  const int64_t stored = tile.rows.len - tile.row;
  if (stored <= 0) return;
  // The keys of the sequence, and the rows from this tile's on that are used; behind them are zeros.
  const int64_t num_keys = tile.seq < 0 ? 0 : used_keys(params, tile.seq, tile.rows.len);
  const int64_t rows = max(num_keys - tile.row, int64_t{0});
  const int kv_head = blockIdx.y, group = params.heads / params.kv_heads;
  const int64_t global_row = tile.rows.begin + tile.row;
  const RowRange queries =
      tile.seq < 0 ? RowRange{0, 0} : sequence_rows(params.q_offsets, tile.seq);
  const Window window =
      Window{num_keys - queries.len, params.window_left, params.window_right}.transposed();
  const int tile_rows = static_cast<int>(min(rows, int64_t{kTile}));
  const int64_t last_query =
      tile_rows == 0 ? 0 : window.last_column(tile.row, tile_rows, queries.len);

  const T scale = static_cast<T>(params.scale);
  OutTile<Config> dk = {}, dv = {};
  if (tile.seq >= 0) {
    load_operand<Config>(shared.sK, params.k, global_row, kv_head, rows, params.dim_qk);
    load_operand<Config>(shared.sV, params.v, global_row, kv_head, rows, params.dim_v);
  }
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const HeadBias<T> bias(params, head, queries, {tile.rows.begin, num_keys});
    T key_sums[kPerThread] = {};  // of this thread's columns
    for (int64_t query = window.first_column(tile.row) / kTile * kTile; query < last_query;
         query += kTile) {
      if (!some_query_sees<kTile>(params, queries, query, tile.row, kTile)) continue;
      __syncthreads();
      const int64_t first = queries.begin + query;
      load_operand<Config>(shared.sQ, params.q, first, head, queries.len - query, params.dim_qk);
      load_operand<Config>(shared.sGradOut, params.grad_out, first, head, queries.len - query,
                           params.dim_v);
      __syncthreads();
      ScoreTile<Config> p, dp;  // transposed: keys by queries
      scores<Config>(p, shared.sK, shared.sQ, x, y);
      scores<Config>(dp, shared.sV, shared.sGradOut, x, y);
      add_biases<Config>(p, scale, bias.any, [&](int i, int j) {
        return bias.of(min(query + x + Config::kSide * j, queries.len - 1),
                       min(tile.row + y + Config::kSide * i, num_keys - 1));
      });
      T delta[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int column = x + Config::kSide * j;
        const bool valid = query + column < queries.len;
        const int64_t statistic = (first + (valid ? column : 0)) * params.heads + head;
        const T lse = params.silu ? T(0) : finite_lse<T>(params, statistic);
        delta[j] = static_cast<const T*>(params.delta)[statistic];
        const bool ranged = params.key_ranges != nullptr;
        const RowRanges ranges =
            ranged ? RowRanges(params, first + (valid ? column : 0)) : RowRanges();
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          const int64_t key = tile.row + y + Config::kSide * i;
          const VisibleColumns visible(window, key, query, kTile, queries.len);
          const bool seen = visible.contains(column) && (!ranged || ranges.contains(key));
          const T z = p[i][j];
          if (params.silu) {
            const T gate = precise_sigmoid(z);
            p[i][j] = seen ? delta[j] * (z * gate) : T(0);
            dp[i][j] *= seen ? delta[j] * silu_slope(z, gate) : T(0);
          } else {
            p[i][j] = seen ? exp(z - lse) : T(0);
          }
        }
      }
      accumulate<Config>(dv, p, shared.sP, shared.sGradOut, x, y);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j)
          p[i][j] = params.silu ? dp[i][j] : p[i][j] * (dp[i][j] - delta[j]);
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) key_sums[i] += p[i][j];
      }
      accumulate<Config>(dk, p, shared.sP, shared.sQ, x, y);
    }
#pragma unroll
    for (int i = 0; params.key_sums != nullptr && i < kPerThread; ++i) {
      const T sum = row_sum(key_sums[i]);
      const int row = y + Config::kSide * i;
      if (x == 0 && row < rows)
        static_cast<T*>(params.key_sums)[(global_row + row) * params.heads + head] = sum;
    }
  }
  T scales[kPerThread], ones[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    scales[i] = scale;
    ones[i] = 1;
  }
  // Rows that are not used have taken part in products.
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int c = 0; c < Config::kOutPerThread && y + Config::kSide * i >= rows; ++c)
      dk[i][c] = dv[i][c] = 0;
  }
  store_result<Config>(dk, scales, params.grad_k, global_row, kv_head, stored, params.dim_qk, x, y);
  store_result<Config>(dv, ones, params.grad_v, global_row, kv_head, stored, params.dim_v, x, y);
}

// Head dims up to 64 share one kernel: fewer to compile.
template <typename Element, int kDim>
using SharedConfig = FmaConfig<Element, (kDim < 64 ? 64 : kDim)>;

template <typename Element>
cudaError_t launch_forward_fma(const AttentionParams& params, cudaStream_t stream) {
  static constexpr PathName kName = PathName("cuda.attention.forward.fma.") + kElementName<Element>;
  return for_dim(params, [&](auto dim) {
    using Config = SharedConfig<Element, dim.value>;
    return launch<forward_fma<Config>>(
        params, tile_grid(params, params.q_offsets, Config::kTile, params.heads), Config::kThreads,
        sizeof(FmaForwardStorage<Config>), stream, kName);
  });
}

template <typename Element>
cudaError_t launch_backward_fma(const AttentionBackwardParams& params, cudaStream_t stream) {
  static constexpr PathName kName =
      PathName("cuda.attention.backward.fma.") + kElementName<Element>;
  return for_dim(params, [&](auto dim) {
    using Config = SharedConfig<Element, dim.value>;
    const cudaError_t error = launch<backward_dq_fma<Config>>(
        params, tile_grid(params, params.q_offsets, Config::kTile, params.heads), Config::kThreads,
        sizeof(FmaBackwardStorage<Config>), stream, kName);
    if (error != cudaSuccess) return error;
    return launch<backward_dkdv_fma<Config>>(
        params, tile_grid(params, params.kv_offsets, Config::kTile, params.kv_heads),
        Config::kThreads, sizeof(FmaBackwardStorage<Config>), stream, nullptr);
  });
}

template <typename Element>
cudaError_t launch_table_gradients_fma(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim(params, [&](auto dim) {
    using Config = SharedConfig<Element, dim.value>;
    static_assert(Config::kThreads / 32 == kTableWarps);
    return launch<table_gradients_fma<Config>>(params, {params.table_ctas, params.heads},
                                               Config::kThreads, sizeof(FmaBackwardStorage<Config>),
                                               stream, nullptr);
  });
}

}  // namespace jagged_cuda::attention
