// Backward of jagged_target_attention on mma.sync (compute capability 8.0 and later), 16-bit
// elements.
//
// With P = exp(scale S - lse), dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP -
// delta):
//     dQ = scale dS K        dK = scale dS^T Q        dV = P^T dO
// One kernel does all three: K and V are read once, dK and dV written once, and nothing is
// recomputed.
//
// Grid: x = chunks of keys (find_chunk), times key/value heads. A CTA holds all rows,
// the N queries of all heads of a group (at most kTileM), and walks over its keys in steps:
//     scores: each warp has 16 keys and some of the rows; it computes P^T and dS^T, as in
//             backward_mma_sync.cuh, and leaves them in shared memory.
//     dK, dV: each warp has 16 keys and some of the columns, sums over all rows, and stores.
//     dQ:     each warp has 16 rows and some of the columns, which it keeps over all steps.
//
// Shared memory: Q and dO kTileM rows, K and V kStep rows in 2 stages, of 2 kDim bytes, lse and
// delta, P and dS kStep rows of 2 kTileM bytes, with 16 rows in the place of V: 18, 36, 72, 80 KiB for
// kDim 32, 64, 128, 256 with 16 rows, 28, 48, 88, 101 KiB with 32.
//
// Barriers: two per step. Before the first every thread waits for its copies of that step (before
// the first of all, those of Q and dO too, and writes lse and delta), and after it the other stage,
// P and dS may be overwritten; the second comes when P and dS are there.
//
// A sequence of one chunk gets its dQ at once. Of longer ones each chunk writes its part in f32 to
// the workspace, and merge_backward (target_merge.cuh) adds them up in order: no atomics, the same bits
// at every run.
//
// An empty sequence has one chunk without keys: dQ 0. Rows and keys past the end are zeros in
// shared memory, P and dS of keys past the end are 0, and lse and delta of rows past the end, so
// that they add nothing. Rows of k and v outside all sequences get zeros.
#pragma once

#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/target_merge.cuh"
#include "cuda/kernels/attention/target_tile.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda::attention {

// kRows_: 16, 32 or 128; with 256 dims 128 means 64.
template <typename Element_, int kDim_, int kRows_>
struct TargetBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kTileM = kDim == 256 && kRows_ > 32 ? 64 : kRows_;
  static constexpr int kWarps = kTileM <= 32 ? 4 : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStep = kDim == 256 ? 32 : 64;  // keys
  static constexpr int kStages = 2;
  static constexpr int kKeyWarps = kStep / 16;  // of the scores, of dK and dV
  // Products are 16 columns wide: with 16 rows some warps have none, of the scores at 256 dims, of dQ
  // at 32.
  static constexpr int kScoreColumns = std::max(kTileM / (kWarps / kKeyWarps), 16);
  // With 16 rows P and dS lie side by side in the first columns of V, whose rows only their own warp
  // has read.
  static constexpr bool kScoresInV = kTileM == 16;
  static constexpr int kDsColumn = kScoresInV ? kTileM : 0;
  static constexpr int kKeyColumns = kDim / (kWarps / kKeyWarps);     // of dK and dV
  static constexpr int kPiece = kKeyColumns < 64 ? kKeyColumns : 64;  // that are summed at a time
  static constexpr int kRowColumns = std::max(kDim / (kWarps / (kTileM / 16)), 16);  // of dQ
  static constexpr int kRowWarps = kWarps / (kDim / kRowColumns);
  // As many as shared memory has room for; at 32 dims, where it would be more, as registers have.
  static constexpr int kMinCtas = kTileM > 32  ? (kDim == 32 ? 2 : 1)
                                  : kDim == 32 ? 5
                                  : kDim == 64 ? (kTileM == 16 ? 6 : 4)
                                               : (kDim == 128 && kTileM == 16 ? 3 : 2);
  static constexpr PathName kName =
      PathName("cuda.target.backward.mma_sync.d") + kDim + ".r" + kTileM;
  static_assert(!kScoresInV || (kScoreColumns == kTileM && 2 * kTileM <= kDim));
  static_assert(kScoreColumns % 16 == 0 && kPiece % 16 == 0 && kRowColumns % 16 == 0);
};

template <typename Config>
struct TargetBackwardStorage {
  using Element = typename Config::Element;
  using KeysTile = SharedTile<Element, Config::kStep, Config::kDim>;
  struct None {};
  SharedTile<Element, Config::kTileM, Config::kDim> sQ;
  SharedTile<Element, Config::kTileM, Config::kDim> sGradOut;
  KeysTile sK[Config::kStages];
  KeysTile sV[Config::kStages];
  std::conditional_t<Config::kScoresInV, None,
                     SharedTile<Element, Config::kStep, std::max(Config::kTileM, 32)>[2]>
      sScores;                             // P^T, dS^T
  alignas(16) float sLse[Config::kTileM];  // times log2(e)
  alignas(16) float sDelta[Config::kTileM];

  // P^T (0) or dS^T (1) of a step.
  __device__ __forceinline__ auto& scores(int which, int stage) {
    if constexpr (Config::kScoresInV) {
      return sV[stage];
    } else {
      return sScores[which];
    }
  }
};

// The block of columns from `column` on, which is a multiple of what is read from there, a power of
// two.
template <typename Tile>
__device__ __forceinline__ LaneAddress<Tile> from_column(LaneAddress<Tile> address, int column) {
  address.base = address.block(0, column);
  return address;
}

// acc += a b over the first `depth` columns of a (16 rows of a warp) and rows of b, at most kDepth.
template <int kDepth, int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void mma_rows_by_columns(Accumulator<1, kBlocks>& acc,
                                                    const RowOperand<false, 1, ATile>& a_rows,
                                                    LaneAddress<BTile> b_rows, int depth) {
  using Element = typename ATile::Element;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    if (k >= depth) break;
    uint32_t a[4];
    a_rows.read(a, 0, k);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_rows.block(k, block * 8));
      ptx::mma_m16n8k16<Element>(acc[0][block], a, b[0], b[1]);
      ptx::mma_m16n8k16<Element>(acc[0][block + 1], a, b[2], b[3]);
    }
  }
}

// acc += a^T b: a all rows of a tile and 16 columns from LaneAddress::by_columns on, b as many rows
// from LaneAddress::by_rows on.
template <int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void mma_columns_by_columns(Accumulator<1, kBlocks>& acc,
                                                       LaneAddress<ATile> a_columns,
                                                       LaneAddress<BTile> b_rows) {
  using Element = typename ATile::Element;
#pragma unroll
  for (int k = 0; k < ATile::kRows; k += 16) {
    uint32_t a[4];
    ptx::ldmatrix_x4_trans(a, a_columns.block(k, 0));
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_rows.block(k, block * 8));
      ptx::mma_m16n8k16<Element>(acc[0][block], a, b[0], b[1]);
      ptx::mma_m16n8k16<Element>(acc[0][block + 1], a, b[2], b[3]);
    }
  }
}

// Exchanges 4x4 words between the four lanes of a quad: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = step == 1 ? pair * 2 : pair, high = low + step;
      const uint32_t sent = upper ? words[low] : words[high];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, sent, step);
      (upper ? words[low] : words[high]) = received;
    }
  }
}

// Writes the elements of words[i] to columns `column` + 8 i and the next ones, as far as they are below
// `columns`; `row` is column 0. `paired`: these pairs are at multiples of 4 bytes. One after another
// through the same register, so that the code is short.
template <typename Element, int kWords>
__device__ __forceinline__ void store_word_pairs(Element* row, const uint32_t (&words)[kWords],
                                                 int column, int columns, bool paired) {
  uint32_t left[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) left[i] = words[i];
#pragma unroll 1
  for (int i = 0; i < kWords; ++i, column += 8) {
    auto* two = reinterpret_cast<uint16_t*>(row + column);
    if (paired && column + 1 < columns) {
      *reinterpret_cast<uint32_t*>(two) = left[0];
    } else {
      if (column < columns) two[0] = static_cast<uint16_t>(left[0]);
      if (column + 1 < columns) two[1] = static_cast<uint16_t>(left[0] >> 16);
    }
#pragma unroll
    for (int next = 1; next < kWords; ++next) left[next - 1] = left[next];
  }
}

// Writes the 16 rows of a warp times `scale`. `g` is the first row and column, `rows` and
// `columns` what exists from there on. Vectors of 16 bytes if `aligned`, built from four blocks by
// an exchange between the lanes of a quad.
template <typename Element, int kBlocks>
__device__ __forceinline__ void store_accumulator(const Accumulator<1, kBlocks>& acc, float scale,
                                                  Element* g, int64_t row_stride, int rows,
                                                  int columns, bool aligned, int lane) {
  const bool paired = reinterpret_cast<uintptr_t>(g) % 4 == 0 && row_stride % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    Element* g_row = g + row * row_stride;
    const auto packed = [&](int block) {
      return pack<Element>(acc[0][block][2 * half] * scale, acc[0][block][2 * half + 1] * scale);
    };
    if (kBlocks % 4 == 0 && aligned) {
#pragma unroll
      for (int block = 0; block < kBlocks / 4 * 4; block += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = packed(block + i);
        transpose_quad(words, lane);
        const int column = (block + lane % 4) * 8;
        if (row < rows && column < columns) {
          *reinterpret_cast<uint4*>(g_row + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    } else if (row < rows) {
      uint32_t words[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) words[block] = packed(block);
      store_word_pairs(g_row, words, 2 * (lane % 4), columns, paired);
    }
  }
}

// lse and delta of all rows, four lanes per row. O and dO come from global memory, so that this
// need not wait for the copies that are under way.
template <typename Element, int kThreads, int kRows>
__device__ __forceinline__ void load_row_statistics(float* sLse, float* sDelta,
                                                    const TargetAttentionBackwardParams& params,
                                                    const TargetRows& target, int thread) {
  const int part = thread % 4;
#pragma unroll 1
  for (int row = thread / 4; row < kRows; row += kThreads / 4) {
    const bool exists = row < target.count();
    const int64_t index = target.index(exists ? row : 0);
    const Element* gOut = static_cast<const Element*>(params.out) + index * params.dim_v;
    const Element* gGradOut = static_cast<const Element*>(params.grad_out.data) +
                              target.offset(params.grad_out, exists ? row : 0);
    float sum = 0.0f;
    if (params.aligned) {
#pragma unroll 4
      for (int first = part * 8; first < params.dim_v; first += 32) {
        const uint4 packed_out = *reinterpret_cast<const uint4*>(gOut + first),
                    packed_grad = *reinterpret_cast<const uint4*>(gGradOut + first);
        const Element* out = reinterpret_cast<const Element*>(&packed_out);
        const Element* grad = reinterpret_cast<const Element*>(&packed_grad);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += static_cast<float>(grad[e]) * static_cast<float>(out[e]);
      }
    } else {
      for (int e = part; e < params.dim_v; e += 4)
        sum += static_cast<float>(gGradOut[e]) * static_cast<float>(gOut[e]);
    }
    sum = quad_sum(sum);
    if (part == 0) {
      sLse[row] = exists ? params.lse[index] * kLog2E : 0.0f;
      if (params.grad_lse != nullptr) sum -= params.grad_lse[index];
      sDelta[row] = exists ? sum : 0.0f;
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void target_backward(
    const __grid_constant__ TargetAttentionBackwardParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kStep = Config::kStep,
                kThreads = Config::kThreads, kStages = Config::kStages,
                kKeyWarps = Config::kKeyWarps, kPiece = Config::kPiece,
                kDsColumn = Config::kDsColumn;
  constexpr int kScoreBlocks = Config::kScoreColumns / 8, kRowColumns = Config::kRowColumns;
  using KeysTile = SharedTile<Element, kStep, kDim>;
  using RowsTile = SharedTile<Element, kTileM, kDim>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<TargetBackwardStorage<Config>*>(shared_bytes);
  ptx::griddepcontrol_launch_dependents();

  const int kv_head = blockIdx.x % params.kv_heads;
  const TargetChunk chunk = find_chunk(params, blockIdx.x / params.kv_heads);
  if (!chunk.exists) return;
  const int64_t grad_k_stride = int64_t{params.kv_heads} * params.dim_qk,
                grad_v_stride = int64_t{params.kv_heads} * params.dim_v;
  Element* gGradK = static_cast<Element*>(params.grad_k) + chunk.first_key * grad_k_stride +
                    kv_head * params.dim_qk;
  Element* gGradV = static_cast<Element*>(params.grad_v) + chunk.first_key * grad_v_stride +
                    kv_head * params.dim_v;
  if (chunk.seq < 0) {
    store_zeros<kThreads>(gGradK, grad_k_stride, chunk.keys, params.dim_qk);
    store_zeros<kThreads>(gGradV, grad_v_stride, chunk.keys, params.dim_v);
    return;
  }
  const TargetRows target(params, chunk.seq, kv_head);
  const int rows = target.count();

  const Element* gK = row_of<Element>(params.k, chunk.first_key, kv_head);
  const Element* gV = row_of<Element>(params.v, chunk.first_key, kv_head);
  const uint64_t policy = ptx::l2_policy(/*is_read_once=*/true);
  const auto load_step = [&](int step) {
    const int key = step * kStep, stage = step % kStages;
    if (key < chunk.keys) {
      load_tile<kThreads>(shared.sK[stage], gK + key * params.k.row_stride, params.k.row_stride,
                          chunk.keys - key, params.dim_qk, params.aligned, policy);
      load_tile<kThreads>(shared.sV[stage], gV + key * params.v.row_stride, params.v.row_stride,
                          chunk.keys - key, params.dim_v, params.aligned, policy);
    }
    ptx::cp_async_commit();
  };
  load_query_rows<kThreads>(shared.sQ, params.q, target, 0, rows, params.dim_qk, params.aligned);
  load_query_rows<kThreads>(shared.sGradOut, params.grad_out, target, 0, rows, params.dim_v,
                            params.aligned);
  ptx::cp_async_commit();
  load_step(0);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_key = warp % kKeyWarps * 16;
  const int score_column = warp / kKeyWarps * Config::kScoreColumns;  // a row of q
  const int key_column = warp / kKeyWarps * Config::kKeyColumns;      // of dK and dV
  const int warp_row = warp % Config::kRowWarps * 16;                 // of dQ
  const int row_column = warp / Config::kRowWarps * kRowColumns;      // of dQ
  const float scale_log2 = params.scale * kLog2E;
  load_row_statistics<Element, kThreads, kTileM>(shared.sLse, shared.sDelta, params, target,
                                                 threadIdx.x);

  // 16 keys of P or dS as rows.
  const auto scores_of_keys = [&](auto& tile, int column) {
    RowOperand<false, 1, std::remove_reference_t<decltype(tile)>> operand(tile, warp_key, lane);
    operand.rows = from_column(operand.rows, column);
    return operand;
  };
  const auto q_as_rows = LaneAddress<RowsTile>::by_rows(shared.sQ, 0, lane);
  const auto grad_out_as_rows = LaneAddress<RowsTile>::by_rows(shared.sGradOut, 0, lane);
  Accumulator<1, kRowColumns / 8> dq = {};
#pragma unroll 1
  for (int step = 0; step * kStep < chunk.keys; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    load_step(step + 1);
    const int keys = chunk.keys - step * kStep - warp_key, stage = step % kStages;
    auto &sP = shared.scores(0, stage), &sDs = shared.scores(1, stage);
    using ScoresTile = std::remove_reference_t<decltype(sP)>;

    if (score_column < rows) {
      Accumulator<1, kScoreBlocks> s = {}, dp = {};  // S^T and dP^T
      mma_rows_by_rows(s, RowOperand<false, 1, KeysTile>(shared.sK[stage], warp_key, lane),
                       LaneAddress<RowsTile>::by_columns(shared.sQ, score_column, lane));
      mma_rows_by_rows(dp, RowOperand<false, 1, KeysTile>(shared.sV[stage], warp_key, lane),
                       LaneAddress<RowsTile>::by_columns(shared.sGradOut, score_column, lane));
      if constexpr (Config::kScoresInV) __syncwarp();  // all lanes have read V
#pragma unroll
      for (int block = 0; block < kScoreBlocks; ++block) {
        const int row = score_column + block * 8 + 2 * (lane % 4);
        const float2 lse = *reinterpret_cast<const float2*>(&shared.sLse[row]);
        const float2 delta = *reinterpret_cast<const float2*>(&shared.sDelta[row]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = half * 8 + lane / 4;
          const bool exists = key < keys;
          const float p0 = ptx::ex2_approx(s[0][block][2 * half] * scale_log2 - lse.x),
                      p1 = ptx::ex2_approx(s[0][block][2 * half + 1] * scale_log2 - lse.y);
          const float ds0 = p0 * (dp[0][block][2 * half] - delta.x),
                      ds1 = p1 * (dp[0][block][2 * half + 1] - delta.y);
          const int tile_chunk = (score_column + block * 8) / 8;
          reinterpret_cast<uint32_t*>(sP.chunk(warp_key + key, tile_chunk))[lane % 4] =
              exists ? pack<Element>(p0, p1) : 0;
          reinterpret_cast<uint32_t*>(
              sDs.chunk(warp_key + key, kDsColumn / 8 + tile_chunk))[lane % 4] =
              exists ? pack<Element>(ds0, ds1) : 0;
        }
      }
    }
    __syncthreads();

    if (keys > 0) {
      const int64_t key = step * kStep + warp_key;
#pragma unroll 1
      for (int column = key_column; column < key_column + Config::kKeyColumns; column += kPiece) {
        Accumulator<1, kPiece / 8> dv = {};
        mma_rows_by_columns<kTileM>(dv, scores_of_keys(sP, 0),
                                    from_column(grad_out_as_rows, column), rows);
        store_accumulator(dv, 1.0f, gGradV + key * grad_v_stride + column, grad_v_stride, keys,
                          params.dim_v - column, params.aligned, lane);
        Accumulator<1, kPiece / 8> dk = {};
        mma_rows_by_columns<kTileM>(dk, scores_of_keys(sDs, kDsColumn),
                                    from_column(q_as_rows, column), rows);
        store_accumulator(dk, params.scale, gGradK + key * grad_k_stride + column, grad_k_stride,
                          keys, params.dim_qk - column, params.aligned, lane);
      }
    }
    if (warp_row < rows) {
      mma_columns_by_columns(
          dq, from_column(LaneAddress<ScoresTile>::by_columns(sDs, 0, lane), kDsColumn + warp_row),
          from_column(LaneAddress<KeysTile>::by_rows(shared.sK[stage], 0, lane), row_column));
    }
  }
  ptx::cp_async_wait<0>();

  const bool whole = chunk.whole || params.parts == nullptr;
  const int part_columns = round_up_to_8(params.dim_qk);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    if (row >= rows) continue;
    Element* gGradQ = static_cast<Element*>(params.grad_q) + target.index(row) * params.dim_qk;
#pragma unroll
    for (int block = 0; block < kRowColumns / 8; ++block) {
      const int column = row_column + block * 8 + 2 * (lane % 4);
      const float low = dq[0][block][2 * half] * params.scale,
                  high = dq[0][block][2 * half + 1] * params.scale;
      if (whole) {
        store_pair(gGradQ + column, low, high, column, params.dim_qk, params.dim_qk % 2 == 0);
      } else if (column < part_columns) {
        *reinterpret_cast<float2*>(
            params.parts + part_row(params, chunk.slot, kv_head, row) * part_columns + column) =
            make_float2(low, high);
      }
    }
  }
}

template <typename Config>
cudaError_t launch_target_backward_rows(const TargetAttentionBackwardParams& params,
                                        cudaStream_t stream) {
  if (target_rows(params) > Config::kTileM) return cudaErrorInvalidValue;
  const cudaError_t error =
      launch<target_backward<Config>>(params, target_grid(params, 1), Config::kThreads,
                                      sizeof(TargetBackwardStorage<Config>), stream, Config::kName);
  if (error != cudaSuccess) return error;
  return launch_merge<merge_backward<typename Config::Element>>(params, stream);
}

template <typename Element>
cudaError_t launch_target_backward_mma_sync(const TargetAttentionBackwardParams& params,
                                            cudaStream_t stream) {
  return for_dim_and_rows(params, [&](auto dim, auto rows) {
    return launch_target_backward_rows<TargetBackwardConfig<Element, dim.value, rows.value>>(
        params, stream);
  });
}

}  // namespace jagged_cuda::attention
