// What the backward kernels for head dims of 65 to 128 on wgmma and TMA (compute capability 9.0), 16-bit
// elements, have in common: backward_bulk.cuh, a CTA for each tile, and backward_items.cuh, warpgroups that
// take tiles one after another. Mathematics and order are those of backward_wgmma.cuh.
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"
#include "cuda/kernels/attention/backward_wgmma.cuh"
#include "cuda/kernels/attention/store_tile.cuh"

namespace jagged_cuda::attention {

constexpr int kBulkRows = 64;  // that a warpgroup owns, and that a step walks over
constexpr int kBulkDim = 128;

template <typename Element>
using BulkTile = WarpgroupTile<Element, kBulkRows, kBulkDim>;
using BulkScores = Accumulator<1, kBulkRows / 8>;
using BulkSums = Accumulator<1, kBulkDim / 8>;

struct BulkBackwardParams : BackwardOperands {  // boxes of kBulkRows rows
  CUtensorMap grad_q, grad_k, grad_v;           // of kStoredRows
};

// A thread of a warpgroup that computes, whose barrier is `barrier`.
struct BulkThread {
  int thread, lane, warp_row, barrier;
  float scale, scale_log2;
  __device__ __forceinline__ BulkThread(const AttentionBackwardParams& params, int own_thread,
                                        int own_barrier)
      : thread(own_thread),
        lane(thread % 32),
        warp_row(thread / 32 * 16),
        barrier(own_barrier),
        scale(static_cast<float>(params.scale)),
        scale_log2(scale * kLog2E) {}

  // Rows of a tile from `first` on become zeros for the tensor cores; all threads of the warpgroup.
  template <typename Tile>
  __device__ __forceinline__ void zero_rows_from(Tile& tile, int first) const {
    zero_tile_rows<128>(tile, first, Tile::kRows, thread);
    ptx::fence_proxy_async();
    ptx::bar_sync(barrier, 128);
  }
};

// Zeros for `rows` rows of a gradient; the threads of a warpgroup.
template <typename Element>
__device__ __forceinline__ void zero_gradient(const HeadsView& grad, int64_t global_row, int head,
                                              int rows, int columns, int thread) {
#pragma unroll 1
  for (int row = thread / 32; row < rows; row += 4) {
    Element* g = row_of<Element>(grad, global_row + row, head);
    for (int column = thread % 32; column < columns; column += 32) g[column] = Element(0.0f);
  }
}

// A warp's 16 rows of a gradient leave through its own rows of a tile, which all products of the warpgroup
// have read: whole ones as a bulk copy of lane 0's. `rows`: those that exist from the tile's first on.
template <typename Element>
__device__ __forceinline__ void send_gradient(BulkTile<Element>& tile, int warp_row,
                                              const CUtensorMap& map, const HeadsView& grad,
                                              const BulkSums& sum, float scale, int64_t global_row,
                                              int head, int rows, int columns, int lane) {
  const float scales[2] = {scale, scale};
  write_rows(tile, warp_row, sum, scales, lane);
  if (rows - warp_row >= kStoredRows) {
    send_rows(map, tile, warp_row, static_cast<int>(global_row) + warp_row, head, lane);
  } else {
    copy_rows(
        row_of<Element>(grad, global_row + warp_row, head),
        [&](int of) { return of * grad.row_stride; }, tile, warp_row, rows - warp_row, columns,
        lane);
  }
}

// A lane's two queries of a tile, for dQ: P and dS have a row for each.
template <typename Element>
class QueryStatistics {
 public:
  // Asks for lse, and for what delta is made of. A row past the end, or one that sees nothing, has P = 0.
  __device__ __forceinline__ QueryStatistics(const AttentionBackwardParams& params,
                                             int64_t global_row, int head, int rows, int thread)
      : params_(params),
        first_statistic_(global_row * params.heads + head),
        rows_(rows),
        lane_(thread % 32),
        own_row_(thread / 32 * 16 + lane_ / 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = own_row_ + 8 * half < rows;
      const int64_t row = global_row + own_row_ + 8 * half, statistic = row * params.heads + head;
      out_[half].load(row_of<Element>(params.out, row, head), valid ? params.dim_v : 0, lane_);
      lse_log2_[half] = valid ? static_cast<const float*>(params.lse)[statistic] * kLog2E : 0.0f;
      delta_[half] = valid && params.grad_lse != nullptr
                         ? -static_cast<const float*>(params.grad_lse)[statistic]
                         : 0.0f;
    }
  }
  // dO has arrived. Leaves delta for dK and dV.
  __device__ __forceinline__ void sum_delta(BulkTile<Element>& sGradOut) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row_ + 8 * half;
      delta_[half] += out_[half].dot(sGradOut, row, lane_);
      if (row < rows_ && lane_ % 4 == 0)
        static_cast<float*>(params_.delta)[first_statistic_ + row * params_.heads] = delta_[half];
    }
  }
  // P = exp2(...)
  __device__ __forceinline__ void exponentiate(BulkScores& s, float scale_log2) const {
#pragma unroll
    for (int i = 0; i < kBulkRows / 2; ++i)
      s[0][i / 4][i % 4] = ptx::ex2_approx(s[0][i / 4][i % 4] * scale_log2 - lse_log2_[i % 4 / 2]);
  }
  // dS = P * (dP - delta)
  __device__ __forceinline__ void multiply(BulkScores& s, const BulkScores& dp) const {
#pragma unroll
    for (int i = 0; i < kBulkRows / 2; ++i)
      s[0][i / 4][i % 4] *= dp[0][i / 4][i % 4] - delta_[i % 4 / 2];
  }

 private:
  const AttentionBackwardParams& params_;
  int64_t first_statistic_;
  int rows_, lane_, own_row_;
  OutRows<Element, kBulkDim> out_[2];
  float lse_log2_[2], delta_[2];
};

// lse and delta of a step's queries in shared memory, for dK and dV: P^T and dS^T have a column for each.
struct StepStatistics {
  alignas(16) float sLse[kBulkRows];
  alignas(16) float sDelta[kBulkRows];

  // Number `index` of 2 kBulkRows: cp.async of one thread. 0 past the last of `valid` queries.
  __device__ __forceinline__ void copy(const AttentionBackwardParams& params, int index,
                                       int64_t global_row, int head, int valid) {
    const int row = index % kBulkRows;
    const bool is_lse = index < kBulkRows;
    const int64_t statistic = (global_row + (row < valid ? row : 0)) * params.heads + head;
    ptx::cp_async_4(is_lse ? &sLse[row] : &sDelta[row],
                    static_cast<const float*>(is_lse ? params.lse : params.delta) + statistic,
                    row < valid ? 4 : 0);
  }
  // P^T = exp2(...)
  __device__ __forceinline__ void exponentiate(BulkScores& s, float scale_log2, int lane) const {
#pragma unroll
    for (int block = 0; block < kBulkRows / 8; ++block) {
      const float2 lse = columns_of_lane(sLse, block, lane);
      const float lse_log2[2] = {lse.x * kLog2E, lse.y * kLog2E};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] = ptx::ex2_approx(s[0][block][i] * scale_log2 - lse_log2[i % 2]);
    }
  }
  // dS^T = P^T * (dP^T - delta)
  __device__ __forceinline__ void multiply(BulkScores& s, const BulkScores& dp, int lane) const {
#pragma unroll
    for (int block = 0; block < kBulkRows / 8; ++block) {
      const float2 delta = columns_of_lane(sDelta, block, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[0][block][i] *= dp[0][block][i] - (i % 2 == 0 ? delta.x : delta.y);
    }
  }
};

// The rows that a warpgroup owns, queries for dQ and keys (kKeys) for dK and dV, and the steps over rows
// of the other side that it walks over.
template <bool kKeys>
struct BulkItem {
  int global_row, row, rows;  // rows: 0 where there is nothing to do
  int seq;                    // -1: rows outside all sequences, which get zeros
  int num_own, num_other, other_begin;
  int first, steps_of_head, steps;  // over the heads of the group, for keys
  int head;

  __device__ __forceinline__ BulkItem() : rows(0) {}
  __device__ __forceinline__ BulkItem(const AttentionBackwardParams& params, const JaggedTile& tile,
                                      int own_head)
      : BulkItem() {
    if (tile.row >= tile.rows.len) return;
    head = own_head;
    row = static_cast<int>(tile.row);
    num_own = static_cast<int>(tile.rows.len);
    global_row = static_cast<int>(tile.rows.begin) + row;
    seq = static_cast<int>(tile.seq);
    num_other = other_begin = first = steps_of_head = steps = 0;
    const int existing = min(kBulkRows, num_own - row);
    if (seq < 0) {
      if (!params.split_by_length) rows = existing;
      return;
    }
    const RowRange other = sequence_rows(kKeys ? params.q_offsets : params.kv_offsets, tile.seq);
    const int64_t queries = kKeys ? other.len : tile.rows.len,
                  keys = kKeys ? tile.rows.len : other.len;
    if (left_to_tiny(params, queries, keys) || left_to_short(params, queries, keys) ||
        left_to_long(params, queries))
      return;
    rows = existing;
    num_other = static_cast<int>(other.len);
    other_begin = static_cast<int>(other.begin);
    const WindowOf<int> seen = window(params);
    first = seen.first_column(row) / kBulkRows * kBulkRows;
    const int last = seen.last_column(row, rows, num_other);
    if (last > first) steps_of_head = (last - first + kBulkRows - 1) / kBulkRows;
    steps = kKeys ? steps_of_head * (params.heads / params.kv_heads) : steps_of_head;
  }

  // Rows are those that it owns.
  __device__ __forceinline__ WindowOf<int> window(const AttentionBackwardParams& params) const {
    const WindowOf<int> of_queries =
        sequence_window(params, kKeys ? num_own - num_other : num_other - num_own);
    return kKeys ? of_queries.transposed() : of_queries;
  }
  // The same in all lanes of a warp, as the compiler then sees.
  __device__ __forceinline__ BulkItem uniform() const {
    const auto same = [](int value) { return __shfl_sync(0xffffffffu, value, 0); };
    BulkItem item;
    item.global_row = same(global_row);
    item.row = same(row);
    item.rows = same(rows);
    item.seq = same(seq);
    item.num_own = same(num_own);
    item.num_other = same(num_other);
    item.other_begin = same(other_begin);
    item.first = same(first);
    item.steps_of_head = same(steps_of_head);
    item.steps = same(steps);
    item.head = same(head);
    return item;
  }
};

// The heads of a group, and the queries of each, that a tile of keys walks over.
class QuerySteps {
 public:
  int head, query;

  __device__ __forceinline__ QuerySteps(const AttentionBackwardParams& params,
                                        const BulkItem<true>& item)
      : head(item.head * (params.heads / params.kv_heads)),
        query(item.first),
        first_(item.first),
        end_(item.first + item.steps_of_head * kBulkRows) {}
  __device__ __forceinline__ void advance() {
    query += kBulkRows;
    if (query < end_) return;
    query = first_;
    ++head;
  }

 private:
  int first_, end_;
};

// dK and dV of a tile of keys, a step at a time; the threads of a warpgroup.
template <typename Element>
struct KeySums {
  BulkSums dk = {}, dv = {};

  // Adds a step of queries from `query` on, which has arrived. started() is called behind the start of S^T
  // and dP^T, scores_done() when K and V have been read.
  template <typename Started, typename ScoresDone>
  __device__ __forceinline__ void add(const BulkThread& own, const BulkItem<true>& item,
                                      const WindowOf<int>& window, int query,
                                      const BulkTile<Element>& sK, const BulkTile<Element>& sV,
                                      const BulkTile<Element>& sQ,
                                      const BulkTile<Element>& sGradOut,
                                      const StepStatistics& statistics, Started started,
                                      ScoresDone scores_done) {
    BulkScores s, dp;  // S^T and dP^T
    ptx::wgmma_fence();
    start_scores_and_grad_probs<true>(s, sK, sQ, dp, sV, sGradOut);
    started();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s[0]);
    statistics.exponentiate(s, own.scale_log2, own.lane);
    if (window.cuts_tile(item.row, kBulkRows, query, kBulkRows, item.num_other))
      replace_unseen(s, 0.0f, window, item.row + own.warp_row + own.lane / 4, query, item.num_other,
                     own.lane);
    const PackedRows<Element, kBulkRows / 8> p(s);
    ptx::fence_operands(dv[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(dv, p, sGradOut);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dp[0]);
    scores_done();
    statistics.multiply(s, dp, own.lane);
    const PackedRows<Element, kBulkRows / 8> ds(s);
    ptx::fence_operands(dk[0]);
    ptx::wgmma_fence();
    wgmma_packed_by_columns<true>(dk, ds, sQ);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv[0]);
    ptx::fence_operands(dk[0]);
  }

  // Both leave through two tiles, which all products of the warpgroup have read.
  __device__ __forceinline__ void send(const BulkThread& own, const BulkBackwardParams& params,
                                       const BulkItem<true>& item, BulkTile<Element>& through_v,
                                       BulkTile<Element>& through_k) const {
    const AttentionBackwardParams& attention = params.attention;
    send_gradient<Element>(through_v, own.warp_row, params.grad_v, attention.grad_v, dv, 1.0f,
                           item.global_row, item.head, item.rows, attention.dim_v, own.lane);
    send_gradient<Element>(through_k, own.warp_row, params.grad_k, attention.grad_k, dk, own.scale,
                           item.global_row, item.head, item.rows, attention.dim_qk, own.lane);
    if (own.lane == 0) ptx::cp_async_bulk_wait_read();
  }

  // Zeros for keys that no query sees.
  __device__ __forceinline__ static void zero(const BulkThread& own,
                                              const AttentionBackwardParams& params,
                                              const BulkItem<true>& item) {
    zero_gradient<Element>(params.grad_k, item.global_row, item.head, item.rows, params.dim_qk,
                           own.thread);
    zero_gradient<Element>(params.grad_v, item.global_row, item.head, item.rows, params.dim_v,
                           own.thread);
  }
};

template <typename Element>
cudaError_t encode_bulk_maps(BulkBackwardParams& params) {
  using Tile = BulkTile<Element>;
  using Stored = WarpgroupTile<Element, kStoredRows, kBulkDim>;
  const AttentionBackwardParams& attention = params.attention;
  const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
  const cudaError_t errors[] = {params.encode<Tile, Tile>(),
                                encode_heads<Stored>(params.grad_q, attention, attention.grad_q,
                                                     queries, attention.heads, attention.dim_qk),
                                encode_heads<Stored>(params.grad_k, attention, attention.grad_k,
                                                     keys, attention.kv_heads, attention.dim_qk),
                                encode_heads<Stored>(params.grad_v, attention, attention.grad_v,
                                                     keys, attention.kv_heads, attention.dim_v)};
  for (cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jagged_cuda::attention
