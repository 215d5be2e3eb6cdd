// Backward of jagged_flash_attention for tiny sequences of head dims of 65 to 256, each head with
// keys of its own: at most kTinyWideRows queries and keys, 16-bit elements, on mma.sync (compute
// capability 8.0 and later).
//
// The mathematics is that of tiny_backward.cuh. One warp takes a head of a sequence, found by its
// offsets alone. Scores are so few that P^T and dS^T of the whole sequence stay in registers, as
// operands, and columns come and go in groups of 32 columns:
//     for each group of columns:  load Q, K, dO, V;  S^T += K Q^T, dP^T += V dO^T
//     P^T, delta, dS^T
//     for each 32 columns:  load dO, write dV = P^T dO
//                           load Q,  write dK = dS^T Q
//                           load K,  write dQ = dS K
// Operands go straight from global memory to registers (tiny_forward.cuh has the fragments), the
// second time from L1 or L2: no shared memory, no barrier, no atomics, the same bits at every run.
//
// Without queries or keys the gradients are zeros. Rows past the end are zeros in registers; P is 0
// for keys past the end, for queries past the end and for those that see nothing (their lse is
// +inf). A sequence that is not tiny is skipped. The last CTAs write zeros to the rows outside all
// sequences.
#pragma once

#include "cuda/kernels/attention/tiny_backward.cuh"
#include "cuda/kernels/attention/tiny_wide_forward.cuh"

namespace jagged_cuda::attention {

template <typename Element_, int kDim_>
struct TinyWideBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // D and Dv, rounded up
  static constexpr int kWarps = 2;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMinCtas = 4;  // 8 warps per SM with up to 255 registers
  static constexpr PathName kName = PathName("cuda.attention.backward.tiny.d") + kDim;
  static_assert(kDim == 128 || kDim == 256);
};

// A number for each query that a lane's columns of S^T belong to: queries 8 i + 2 (lane % 4) + {0, 1}.
template <int kBlocks>
struct TinyQueryValues {
  float values[2 * kBlocks][2];

  // Of one head, `missing` past the end.
  __device__ __forceinline__ static TinyQueryValues load(const void* g, const TinyRows& rows,
                                                         unsigned heads, unsigned head,
                                                         float missing, int lane) {
    TinyQueryValues loaded;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int query = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float value = missing;
      if (query < rows.len)
        value = __ldg(static_cast<const float*>(g) +
                      static_cast<uint64_t>(rows.begin + query) * heads + head);
      loaded.values[i / 2][i % 2] = value;
    }
    return loaded;
  }
};

// One warp's sequence and head; kBlocks blocks of 16 hold its queries and its keys.
template <typename Config, int kBlocks>
struct TinyWideBackward {
  using Element = typename Config::Element;
  static constexpr int kColumnBlocks = Config::kDim / 32;
  // Columns loaded at a time: four operands of kBlocks * kGroup * 8 registers.
  static constexpr int kGroup = 4 / kBlocks;
  using Rows = RowFragments<kGroup>;
  using Pairs = PairFragments<1>;
  // [key block][8 queries][2 * key + query]: lane l holds keys l / 4 and l / 4 + 8.
  using Scores = float[kBlocks][2 * kBlocks][4];
  using Operands = uint32_t[kBlocks][kBlocks][4];

  const AttentionBackwardParams& params;
  const TinySequence& sequence;
  unsigned head;
  int lane;

  // sums += rows rows^T over the columns of a group.
  __device__ __forceinline__ static void add_product(Scores& sums, const Rows (&keys)[kBlocks],
                                                     const Rows (&queries)[kBlocks]) {
#pragma unroll
    for (int block = 0; block < kGroup; ++block) {
#pragma unroll
      for (int key = 0; key < kBlocks; ++key) {
        const uint4 low = keys[key].chunks[0][block], high = keys[key].chunks[1][block];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y},
                       second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const uint4 other = queries[i / 2].chunks[i % 2][block];
          ptx::mma_m16n8k16<Element>(sums[key][i], first, other.x, other.y);
          ptx::mma_m16n8k16<Element>(sums[key][i], second, other.z, other.w);
        }
      }
    }
  }

  // S^T becomes P^T.
  __device__ __forceinline__ void exponentiate(Scores& s,
                                               const TinyQueryValues<kBlocks>& lse) const {
    const int queries = sequence.queries.len, keys = sequence.keys.len;
    const float scale = static_cast<float>(params.scale),
                // Not 0, so that -inf times it is infinite.
        scale_log2 = scale == 0.0f ? 1e-30f : scale * kLog2E;
    const TinyWindow over_keys(params, queries, keys);
    const WindowOf<int> window = over_keys.transposed();
#pragma unroll
    for (int row = 0; row < 2 * kBlocks; ++row) {
      const int key = row * 8 + lane / 4;
      const VisibleColumns visible(window, key, 0, kBlocks * 16, key < keys ? queries : 0);
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        float& score = s[row / 2][i / 2][row % 2 * 2 + i % 2];
        score = visible.contains(i / 2 * 8 + lane % 4 * 2 + i % 2)
                    ? ptx::ex2_approx(__fmaf_rn(score, scale_log2, -lse.values[i / 2][i % 2]))
                    : 0.0f;
      }
    }
  }

  // dP^T becomes dS^T; `delta` is -dlse.
  __device__ __forceinline__ static void differentiate(Scores& dp, const Scores& p,
                                                       TinyQueryValues<kBlocks> delta) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int row = 0; row < 2 * kBlocks; ++row) {
        const int element = row % 2 * 2 + i % 2;
        sum += p[row / 2][i / 2][element] * dp[row / 2][i / 2][element];
      }
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      delta.values[i / 2][i % 2] += sum;
    }
#pragma unroll
    for (int row = 0; row < 2 * kBlocks; ++row) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const int element = row % 2 * 2 + i % 2;
        float& value = dp[row / 2][i / 2][element];
        value = p[row / 2][i / 2][element] * (value - delta.values[i / 2][i % 2]);
      }
    }
  }

  __device__ __forceinline__ static void pack_operands(Operands& a, const Scores& s) {
#pragma unroll
    for (int key = 0; key < kBlocks; ++key) {
#pragma unroll
      for (int query = 0; query < kBlocks; ++query) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = s[key][2 * query + i / 2];
          a[key][query][i] = pack<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
    }
  }

  // Writes 32 columns from `column` on of `scale` times a b; `b` are rows of `from`.
  __device__ __forceinline__ void store_product(const HeadsView& to, const TinyRows& to_rows,
                                                const Operands& a, const HeadsView& from,
                                                const TinyRows& from_rows, int column, int columns,
                                                float scale) const {
    Pairs b[kBlocks];
    const int row = lane / 4, pair_row = lane % 4 * 2, pair_column = column + lane / 4 * 4;
    const LaneRows source(from, from_rows.begin + pair_row, head, pair_column),
        target(to, to_rows.begin + row, head, column + lane % 4 * 8);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      b[block].load(source, block * 16, from_rows.len - pair_row, columns - pair_column);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float o[4][4] = {};
#pragma unroll
      for (int inner = 0; inner < kBlocks; ++inner) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::mma_m16n8k16<Element>(o[i], a[block][inner], b[inner].operand(i, 0),
                                     b[inner].operand(i, 1));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = block * 16 + half * 8;
        if (own + row < to_rows.len)
          store_row<Element, 1>(o, half, scale, target.row(own), columns - column - lane % 4 * 8);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const TinyRows &queries = sequence.queries, &keys = sequence.keys;
    const int row = lane / 4, own_column = lane % 4 * 8;
    Operands p, ds;
    {
      auto lse =
          TinyQueryValues<kBlocks>::load(params.lse, queries, params.heads, head, -INFINITY, lane);
      TinyQueryValues<kBlocks> delta = {};
      if (params.grad_lse != nullptr)
        delta = TinyQueryValues<kBlocks>::load(params.grad_lse, queries, params.heads, head, 0.0f,
                                               lane);
      Scores s = {}, dp = {};
      const LaneRows gQ(params.q, queries.begin + row, head, own_column),
          gGradOut(params.grad_out, queries.begin + row, head, own_column),
          gK(params.k, keys.begin + row, head, own_column),
          gV(params.v, keys.begin + row, head, own_column);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; block += kGroup) {
        Rows q[kBlocks], grad_out[kBlocks], k[kBlocks], v[kBlocks];
        const int column = block * 32;
        const auto load = [&](Rows(&rows)[kBlocks], const LaneRows& g, int len, int columns) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i)
            rows[i].load(at_column(g, column), i * 16, len - row, columns - own_column - column);
        };
        load(k, gK, keys.len, params.dim_qk);
        load(q, gQ, queries.len, params.dim_qk);
        load(v, gV, keys.len, params.dim_v);
        load(grad_out, gGradOut, queries.len, params.dim_v);
        add_product(s, k, q);
        add_product(dp, v, grad_out);
      }
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        float& value = lse.values[i / 2][i % 2];
        value = value == -INFINITY ? INFINITY : value * kLog2E;
        delta.values[i / 2][i % 2] *= -1.0f;
      }
      exponentiate(s, lse);
      differentiate(dp, s, delta);
      pack_operands(p, s);
      pack_operands(ds, dp);
    }
    Operands ds_transposed;  // [query block][key block]
#pragma unroll
    for (int i = 0; i < kBlocks * kBlocks * 4; ++i) {
      const int key = i / 4 / kBlocks, query = i / 4 % kBlocks, word = i % 4;
      ds_transposed[query][key][word] =
          ptx::movmatrix_trans(ds[key][query][word / 2 + word % 2 * 2]);
    }
    const float scale = static_cast<float>(params.scale);
    const int columns = max(params.dim_qk, params.dim_v);
#pragma unroll 2
    for (int column = 0; column < columns; column += 32) {
      store_product(params.grad_v, keys, p, params.grad_out, queries, column, params.dim_v, 1.0f);
      store_product(params.grad_k, keys, ds, params.q, queries, column, params.dim_qk, scale);
      store_product(params.grad_q, queries, ds_transposed, params.k, keys, column, params.dim_qk,
                    scale);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void backward_tiny_wide(
    const __grid_constant__ AttentionBackwardParams params) {
  const int lane = threadIdx.x % 32;
  const unsigned heads = params.heads, item_ctas = TinyItem::ctas(params, heads, Config::kWarps);
  ptx::griddepcontrol_launch_dependents();  // launch_longer
  if (blockIdx.x >= item_ctas) {
    fill_outside_gradients(params, blockIdx.x - item_ctas);
    return;
  }
  const TinyItem item(heads, Config::kWarps);
  if (item.seq >= params.q_offsets.num_seqs) return;
  const TinySequence sequence = tiny_sequence(params, item.seq);
  const int queries = sequence.queries.len, keys = sequence.keys.len;
  if (queries == 0 || keys == 0) {
    store_zero_rows(params.grad_q, sequence.queries, item.head, params.dim_qk, lane);
    store_zero_rows(params.grad_k, sequence.keys, item.head, params.dim_qk, lane);
    store_zero_rows(params.grad_v, sequence.keys, item.head, params.dim_v, lane);
  } else if (queries <= 16 && keys <= 16) {
    TinyWideBackward<Config, 1>{params, sequence, item.head, lane}.run();
  } else {
    TinyWideBackward<Config, 2>{params, sequence, item.head, lane}.run();
  }
}

template <typename Element>
cudaError_t launch_backward_tiny_wide(const AttentionBackwardParams& params, cudaStream_t stream) {
  const auto launch_dim = [&](auto dim) {
    using Config = TinyWideBackwardConfig<Element, dim.value>;
    return launch_tiny<backward_tiny_wide<Config>, Config>(params, params.heads, 0, stream);
  };
  return is_wide(params) ? launch_dim(Constant<256>{}) : launch_dim(Constant<128>{});
}

}  // namespace jagged_cuda::attention
