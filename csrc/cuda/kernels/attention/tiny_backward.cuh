// Backward of jagged_flash_attention for tiny sequences: at most kTinyRows queries and keys, head
// dims up to 64, 16-bit elements, on mma.sync (compute capability 8.0 and later).
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(P * dP) - dlse and dS = P * (dP - delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// delta is summed from P and dP rather than from dO and O: O is not read, and its rounding does not
// reach the gradients.
//
// Grid: one warp for each kv head of each sequence, found by its offsets alone (TinyItem). It copies
// K and V, and for one head of the group after another Q, dO and lse, to shared memory:
//     for each 16 queries, each 16 keys:  delta from P^T and dP^T          (where there is more than
//                                                                           one block: below at once)
//     for each 16 keys:
//       for each 16 queries:
//         P^T, dP^T again; dS^T;  dV += P^T dO, dK += dS^T Q, dQ += dS K
//       write dK, dV
//     write dQ
// All sums stay in registers (dQ of all 64 queries), so one pass writes all gradients: no atomics, no
// workspace, the same bits at every run. The transposed products turn P^T and dS^T from accumulators
// into operands as they are; dS needs movmatrix. With grouped heads dK and dV wait for the next head
// in shared memory, in f32.
//
// Shared memory per warp: Q, dO, K, V of 64 rows and 2 kDim bytes, lse and delta: 16.5 KiB for kDim
// 32, 32.5 KiB for 64; with grouped heads 16 and 32 KiB more. Nothing is shared between warps: no
// barrier but __syncwarp. The gradients leave through the rows of K, V and Q.
//
// Without queries or keys the gradients are zeros. Rows past the end are zeros in shared memory; P
// is 0 for keys past the end (their scores start at -inf), for queries past the end and for those
// that see nothing (their lse is +inf). A sequence that is not tiny is skipped. The last CTAs write
// zeros to the rows outside all sequences.
#pragma once

#include "cuda/kernels/attention/tiny_tile.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, bool kGrouped_>
struct TinyBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;           // columns in shared memory: D and Dv, rounded up
  static constexpr bool kGrouped = kGrouped_;  // several heads share a kv head
  // Few, as in the forward pass; one where two would need more than the 99 KiB of some GPUs.
  static constexpr int kWarps = kDim == 64 && kGrouped ? 1 : 2;
  static constexpr int kThreads = kWarps * 32;
  // As many as shared memory holds: 12 warps per SM (168 registers), 6 with grouped heads or 64
  // columns (255), 3 with both.
  static constexpr int kMinCtas = kDim == 32 && !kGrouped ? 6 : 3;
  static constexpr int kOutBlocks = kDim / 8;
  static constexpr PathName kName = PathName("cuda.attention.backward.tiny.d") + kDim;
  static_assert(kDim == 32 || kDim == 64);
};

// dK and dV of one warp between the heads of a group: each lane's own accumulators.
template <typename Config, bool = Config::kGrouped>
struct TinyGroupSums {};
template <typename Config>
struct TinyGroupSums<Config, true> {
  float sums[kTinyRows / 16][2 * Config::kOutBlocks * 4][32];
};

// What one warp holds.
template <typename Config>
struct TinyBackwardStorage : TinyGroupSums<Config> {
  using Tile = SharedTile<typename Config::Element, kTinyRows, Config::kDim>;
  Tile sQ;
  Tile sGradOut;
  Tile sK;
  Tile sV;
  alignas(16) float sLse[kTinyRows];  // times log2(e)
  alignas(16) float sDelta[kTinyRows];
};

// A lane's place in the copies between global memory and a tile: a chunk of every kStep-th row.
template <typename Tile>
struct CopyLane {
  static constexpr int kStep = 32 / Tile::kChunks;
  int row;
  int column;

  __device__ __forceinline__ CopyLane(int lane)
      : row(lane / Tile::kChunks), column(lane % Tile::kChunks * Tile::kChunkElems) {}

  // The chunk in row `row + step * kStep` of the tile.
  __device__ __forceinline__ uint32_t shared(Tile& tile, int step) const {
    // Steps of 4 rows change the swizzle's third bit every other time.
    const uint32_t flip = kStep % 8 == 0 ? 0 : step % 2 * (4 * Tile::kChunkBytes);
    return (ptx::shared_address(tile.chunk(row, column / Tile::kChunkElems)) ^ flip) +
           step * kStep * Tile::kRowBytes;
  }
};

// Starts the copy of a head's rows; zeros up to the next multiple of 16 rows, and in the columns
// past the end.
template <typename Tile>
__device__ __forceinline__ void copy_rows(Tile& tile, const HeadsView& view, const TinyRows& range,
                                          unsigned head, int columns, CopyLane<Tile> lane) {
  const LaneRows source(view, range.begin + lane.row, head, lane.column);
  const int rows = lane.column < columns ? range.len - lane.row : 0;
#pragma unroll
  for (int step = 0; step * lane.kStep < kTinyRows; ++step) {
    const int row = step * lane.kStep;
    if (row % 16 == 0 && row >= range.len) break;
    ptx::cp_async_16(lane.shared(tile, step), source.row(row), row < rows ? 16 : 0);
  }
}

// One head's gradient in global memory, written 16 rows at a time through a tile that no one reads
// any more.
template <typename Tile>
struct GradientRows {
  LaneRows g;
  int rows;  // left from the lane's first on; none in the columns past the end
  CopyLane<Tile> copy;

  __device__ __forceinline__ GradientRows(const HeadsView& view, const TinyRows& range,
                                          unsigned head, int columns, CopyLane<Tile> copy)
      : g(view, range.begin + copy.row, head, copy.column),
        rows(copy.column < columns ? range.len - copy.row : 0),
        copy(copy) {}

  // Rows [row, row + 16), times `scale`.
  template <int kBlocks>
  __device__ __forceinline__ void store(const Accumulator<1, kBlocks>& o, float scale, Tile& tile,
                                        int row, int lane) const {
    using Element = typename Tile::Element;
    const uint32_t words = ptx::shared_address(tile.chunk(row + lane / 4, 0)) + lane % 4 * 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const float (&pair)[4] = o[0][i / 2];
      ptx::st_shared_4((words ^ (i / 2 * Tile::kChunkBytes)) + i % 2 * 8 * Tile::kRowBytes,
                       pack<Element>(pair[i % 2 * 2] * scale, pair[i % 2 * 2 + 1] * scale));
    }
    __syncwarp();
#pragma unroll
    for (int step = 0; step * copy.kStep < 16; ++step) {
      const uint4 chunk = ptx::ld_shared_16(copy.shared(tile, step) + row * Tile::kRowBytes);
      const int own = row + step * copy.kStep;
      if (own < rows) ptx::st_global_16(g.row(own), chunk);
    }
  }
};

// 16 columns of an accumulator as left operand.
template <typename Element>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const Accumulator<1, 2>& s) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack<Element>(s[0][i / 2][i % 2 * 2], s[0][i / 2][i % 2 * 2 + 1]);
}

// o += a b, b 16 rows from LaneAddress::by_rows on.
template <int kOutBlocks, typename Tile>
__device__ __forceinline__ void mma_operand_by_columns(Accumulator<1, kOutBlocks>& o,
                                                       const uint32_t (&a)[4],
                                                       LaneAddress<Tile> b_rows) {
#pragma unroll
  for (int block = 0; block < kOutBlocks; block += 2) {
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, b_rows.block(0, block * 8));
    ptx::mma_m16n8k16<typename Tile::Element>(o[0][block], a, b[0], b[1]);
    ptx::mma_m16n8k16<typename Tile::Element>(o[0][block + 1], a, b[2], b[3]);
  }
}

// A number for each query that a lane's columns of 16 queries belong to.
struct QueryValues {
  float2 halves[2];

  __device__ __forceinline__ static QueryValues read(const float* values, int lane) {
    const auto* pairs = reinterpret_cast<const float2*>(values + lane % 4 * 2);
    return {pairs[0], pairs[4]};
  }
  // Of element i / 4, i % 4 of an accumulator.
  __device__ __forceinline__ float of(int i) const {
    return i % 2 == 0 ? halves[i / 4].x : halves[i / 4].y;
  }
  __device__ __forceinline__ void add(const QueryValues& other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      halves[i].x += other.halves[i].x;
      halves[i].y += other.halves[i].y;
    }
  }
  // += the sums over the lane's keys of P^T * dP^T.
  __device__ __forceinline__ void add_products(const Accumulator<1, 2>& p,
                                               const Accumulator<1, 2>& dp) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      halves[i].x += p[0][i][0] * dp[0][i][0] + p[0][i][2] * dp[0][i][2];
      halves[i].y += p[0][i][1] * dp[0][i][1] + p[0][i][3] * dp[0][i][3];
    }
  }
  __device__ __forceinline__ void sum_over_keys() {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        halves[i].x += __shfl_xor_sync(0xffffffffu, halves[i].x, other);
        halves[i].y += __shfl_xor_sync(0xffffffffu, halves[i].y, other);
      }
    }
  }
};

// One warp's sequence and kv head.
template <typename Config>
struct TinyBackward {
  using Element = typename Config::Element;
  using Storage = TinyBackwardStorage<Config>;
  using Tile = typename Storage::Tile;
  using Address = LaneAddress<Tile>;
  using Gradient = Accumulator<1, Config::kOutBlocks>;

  const AttentionBackwardParams& params;
  const TinySequence& sequence;
  Storage& shared;
  unsigned kv_head;
  int lane;
  int queries;
  int keys;
  float scale;
  float scale_log2;
  WindowOf<int> window;  // over queries
  bool windowed;

  __device__ __forceinline__ TinyBackward(const AttentionBackwardParams& params,
                                          const TinySequence& sequence, Storage& shared,
                                          unsigned kv_head, int lane)
      : params(params),
        sequence(sequence),
        shared(shared),
        kv_head(kv_head),
        lane(lane),
        queries(sequence.queries.len),
        keys(sequence.keys.len),
        scale(static_cast<float>(params.scale)),
        // Not 0, so that -inf times it is infinite.
        scale_log2(scale == 0.0f ? 1e-30f : scale * kLog2E) {
    const TinyWindow over_keys(params, queries, keys);
    window = over_keys.transposed();
    windowed = over_keys.cuts();
  }

  __device__ __forceinline__ void load_keys() const {
    copy_rows(shared.sK, params.k, sequence.keys, kv_head, params.dim_qk, CopyLane<Tile>(lane));
    copy_rows(shared.sV, params.v, sequence.keys, kv_head, params.dim_v, CopyLane<Tile>(lane));
  }

  // Q, dO, lse and dlse of a head; waits for them and for the keys. sDelta is left at -dlse.
  __device__ __forceinline__ void load_queries(unsigned head) const {
    copy_rows(shared.sQ, params.q, sequence.queries, head, params.dim_qk, CopyLane<Tile>(lane));
    copy_rows(shared.sGradOut, params.grad_out, sequence.queries, head, params.dim_v,
              CopyLane<Tile>(lane));
    const auto* gLse = static_cast<const float*>(params.lse);
    const auto* gGradLse = static_cast<const float*>(params.grad_lse);
#pragma unroll
    for (int row = lane; row < kTinyRows; row += 32) {
      const uint64_t statistic = static_cast<uint64_t>(sequence.queries.begin + row) *
                                     static_cast<unsigned>(params.heads) +
                                 head;
      if (row >= queries) break;
      ptx::cp_async_4(&shared.sLse[row], gLse + statistic, 4);
      if (gGradLse != nullptr) ptx::cp_async_4(&shared.sDelta[row], gGradLse + statistic, 4);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    // Each thread reads what it has copied itself. A query past the end, or one that sees nothing,
    // has P = 0.
#pragma unroll
    for (int row = lane; row < kTinyRows; row += 32) {
      if (row - lane >= queries) break;
      const float lse = row < queries ? shared.sLse[row] : -INFINITY;
      shared.sLse[row] = lse == -INFINITY ? INFINITY : lse * kLog2E;
      shared.sDelta[row] = row < queries && gGradLse != nullptr ? -shared.sDelta[row] : 0.0f;
    }
    __syncwarp();
  }

  // P^T and dP^T of 16 keys and 16 queries.
  __device__ __forceinline__ void recompute(Accumulator<1, 2>& p, Accumulator<1, 2>& dp, int key,
                                            int query) const {
    const float hidden = scale_log2 < 0.0f ? INFINITY : -INFINITY;  // as a score makes P 0
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[0][i / 4][i % 4] = key + lane / 4 + i % 4 / 2 * 8 < keys ? 0.0f : hidden;
      dp[0][i / 4][i % 4] = 0.0f;
    }
    mma_rows_by_rows(p, RowOperand<false, 1, Tile>(shared.sK, key, lane),
                     Address::by_columns(shared.sQ, query, lane));
    mma_rows_by_rows(dp, RowOperand<false, 1, Tile>(shared.sV, key, lane),
                     Address::by_columns(shared.sGradOut, query, lane));
    const auto lse = QueryValues::read(shared.sLse + query, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = p[0][i / 4][i % 4];
      score = ptx::ex2_approx(__fmaf_rn(score, scale_log2, -lse.of(i)));
    }
    if (windowed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const VisibleColumns visible(window, key + lane / 4 + 8 * half, query, 16, queries);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!visible.contains(i / 2 * 8 + lane % 4 * 2 + i % 2))
            p[0][i / 2][2 * half + i % 2] = 0.0f;
        }
      }
    }
  }

  // sDelta += rowsum(P * dP).
  __device__ __forceinline__ void add_delta() const {
#pragma unroll 1
    for (int query = 0; query < queries; query += 16) {
      QueryValues sums = {};
#pragma unroll 1
      for (int key = 0; key < keys; key += 16) {
        Accumulator<1, 2> p, dp;
        recompute(p, dp, key, query);
        sums.add_products(p, dp);
      }
      sums.sum_over_keys();
      if (lane < 4) {
        auto* pairs = reinterpret_cast<float2*>(shared.sDelta + query + lane * 2);
        sums.add({pairs[0], pairs[4]});
        pairs[0] = sums.halves[0];
        pairs[4] = sums.halves[1];
      }
    }
    __syncwarp();
  }

  // dK and dV of 16 keys wait in shared memory for the next head.
  __device__ __forceinline__ void save_sums(const Gradient& dk, const Gradient& dv, int key) const {
    if constexpr (Config::kGrouped) {
#pragma unroll
      for (int i = 0; i < Config::kOutBlocks * 4; ++i) {
        shared.sums[key / 16][2 * i][lane] = dk[0][i / 4][i % 4];
        shared.sums[key / 16][2 * i + 1][lane] = dv[0][i / 4][i % 4];
      }
    }
  }
  __device__ __forceinline__ void restore_sums(Gradient& dk, Gradient& dv, int key) const {
    if constexpr (Config::kGrouped) {
#pragma unroll
      for (int i = 0; i < Config::kOutBlocks * 4; ++i) {
        dk[0][i / 4][i % 4] = shared.sums[key / 16][2 * i][lane];
        dv[0][i / 4][i % 4] = shared.sums[key / 16][2 * i + 1][lane];
      }
    }
  }

  // The gradients of one head. kSingle: of at most 16 queries and keys.
  template <bool kSingle>
  __device__ __forceinline__ void head_gradients(unsigned head, bool first, bool last) const {
    constexpr int kQueryBlocks = kSingle ? 1 : kTinyRows / 16;
    const CopyLane<Tile> copy(lane);
    const GradientRows<Tile> gGradQ(params.grad_q, sequence.queries, head, params.dim_qk, copy),
        gGradK(params.grad_k, sequence.keys, kv_head, params.dim_qk, copy),
        gGradV(params.grad_v, sequence.keys, kv_head, params.dim_v, copy);
    if constexpr (!kSingle) add_delta();
    Gradient dq[kQueryBlocks] = {};
#pragma unroll 1
    for (int key = 0; key < (kSingle ? 1 : keys); key += 16) {
      Gradient dk = {}, dv = {};
      if (!first) restore_sums(dk, dv, key);
#pragma unroll
      for (int block = 0; block < kQueryBlocks; ++block) {
        const int query = block * 16;
        if (!kSingle && query >= queries) break;
        Accumulator<1, 2> s, dp;
        uint32_t p[4], ds[4], ds_transposed[4];
        recompute(s, dp, key, query);
        auto delta = QueryValues::read(shared.sDelta + query, lane);
        if constexpr (kSingle) {
          QueryValues sums_of_keys = {};
          sums_of_keys.add_products(s, dp);
          sums_of_keys.sum_over_keys();
          delta.add(sums_of_keys);
        }
        pack_operand<Element>(p, s);
        mma_operand_by_columns(dv, p, Address::by_rows(shared.sGradOut, query, lane));
#pragma unroll
        for (int i = 0; i < 8; ++i) s[0][i / 4][i % 4] *= dp[0][i / 4][i % 4] - delta.of(i);
        pack_operand<Element>(ds, s);
        mma_operand_by_columns(dk, ds, Address::by_rows(shared.sQ, query, lane));
#pragma unroll
        for (int i = 0; i < 4; ++i) ds_transposed[i] = ptx::movmatrix_trans(ds[i / 2 + i % 2 * 2]);
        mma_operand_by_columns(dq[block], ds_transposed, Address::by_rows(shared.sK, key, lane));
      }
      if (last) {
        gGradK.store(dk, scale, shared.sK, key, lane);
        gGradV.store(dv, 1.0f, shared.sV, key, lane);
      } else {
        save_sums(dk, dv, key);
      }
    }
#pragma unroll
    for (int block = 0; block < kQueryBlocks; ++block) {
      if (!kSingle && block * 16 >= queries) break;
      gGradQ.store(dq[block], scale, shared.sQ, block * 16, lane);
    }
    __syncwarp();  // before the next head's copies
  }

  __device__ __forceinline__ void run() const {
    const unsigned group =
        Config::kGrouped ? static_cast<unsigned>(params.heads / params.kv_heads) : 1;
    const unsigned first_head = kv_head * group;
    if (queries == 0 || keys == 0) {
      store_zero_rows(params.grad_k, sequence.keys, kv_head, params.dim_qk, lane);
      store_zero_rows(params.grad_v, sequence.keys, kv_head, params.dim_v, lane);
      for (unsigned head = first_head; head < first_head + group; ++head)
        store_zero_rows(params.grad_q, sequence.queries, head, params.dim_qk, lane);
      return;
    }
    load_keys();
#pragma unroll 1
    for (unsigned member = 0; member < group; ++member) {
      const bool first = member == 0, last = member == group - 1;
      load_queries(first_head + member);
      if (queries <= 16 && keys <= 16) {
        head_gradients<true>(first_head + member, first, last);
      } else {
        head_gradients<false>(first_head + member, first, last);
      }
    }
  }
};

// Zeros in the rows outside all sequences, in CTA `cta` of TinyItem::kFillCtas.
__device__ __forceinline__ void fill_outside_gradients(const AttentionBackwardParams& params,
                                                       unsigned cta) {
  const unsigned heads = params.heads, kv_heads = params.kv_heads;
  fill_outside(params.q_offsets, params.grad_q.data, heads * params.dim_qk / 2, 0.0f, cta);
  fill_outside(params.kv_offsets, params.grad_k.data, kv_heads * params.dim_qk / 2, 0.0f, cta);
  fill_outside(params.kv_offsets, params.grad_v.data, kv_heads * params.dim_v / 2, 0.0f, cta);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_tiny(
    const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(128) char shared_bytes[];
  auto* storage = reinterpret_cast<TinyBackwardStorage<Config>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned kv_heads = params.kv_heads,
                 item_ctas = TinyItem::ctas(params, kv_heads, Config::kWarps);
  ptx::griddepcontrol_launch_dependents();  // launch_longer
  if (blockIdx.x >= item_ctas) {
    fill_outside_gradients(params, blockIdx.x - item_ctas);
    return;
  }
  const TinyItem item(kv_heads, Config::kWarps);
  if (item.seq >= params.q_offsets.num_seqs) return;
  const TinySequence sequence = tiny_sequence(params, item.seq);
  TinyBackward<Config>(params, sequence, storage[warp], item.head, lane).run();
}

template <typename Element>
cudaError_t launch_backward_tiny(const AttentionBackwardParams& params, cudaStream_t stream) {
  return for_dim<64>(params, [&](auto dim) {
    const auto launch_config = [&](auto config) {
      using Config = decltype(config);
      return launch_tiny<backward_tiny<Config>, Config>(
          params, params.kv_heads, Config::kWarps * sizeof(TinyBackwardStorage<Config>), stream);
    };
    return params.heads == params.kv_heads
               ? launch_config(TinyBackwardConfig<Element, dim.value, false>{})
               : launch_config(TinyBackwardConfig<Element, dim.value, true>{});
  });
}

}  // namespace jagged_cuda::attention
