// Forward of jagged_target_attention on mma.sync (compute capability 8.0 and later), 16-bit
// elements.
//
// Online softmax over the keys, as in forward_mma_sync.cuh. The rows of a tile are the N queries of
// all heads of a group, which read the same keys: keys and values pass through the CTA once.
//
// Grid: x = chunks of keys (find_chunk), times key/value heads, times tiles of kTileM
// rows. A CTA has 4 warps, or 2. With few rows the keys of a step are divided between key warps, each
// with a maximum, a sum and an O of its own; with many rows the rows are divided. At 256 dims two
// warps hold the same rows and half of O's columns each (kSplit), and both compute P.
//
// Shared memory: Q kTileM rows, K and V kStep rows in kStages stages, of 2 kDim bytes: for 16 rows
// 25, 34, 68, 72 KiB for kDim 32, 64, 128, 256. Afterwards O of each key warp in f32 takes
// their place.
//
// Barriers: where Q stays in registers, one when it has arrived; one per step, before which every
// thread waits for its copies of that step, and after which the stage of the step before may be
// overwritten; one when every warp has finished and written its maxima and sums to shared memory;
// one when it has written its O there.
//
// A sequence of one chunk gets its result at once. Of longer ones each chunk writes its O, not yet
// divided by the sum, its maxima and sums to the workspace, and merge_forward (target_merge.cuh) adds
// them up in order.
// An empty sequence has one chunk without keys: out 0, lse -inf. Rows and keys past the end are
// zeros in shared memory, their scores -inf, and they are not stored.
#pragma once

#include "cuda/kernels/attention/forward_mma_sync.cuh"
#include "cuda/kernels/attention/target_merge.cuh"
#include "cuda/kernels/attention/target_tile.cuh"

namespace jagged_cuda::attention {

// kRows_: 16, 32 or 128; with 256 dims 128 means 64.
template <typename Element_, int kDim_, int kRows_>
struct TargetForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // columns of Q, K, V in shared memory: D and Dv, rounded up
  static constexpr int kTileM = kDim == 256 && kRows_ > 32 ? 64 : kRows_;
  static constexpr int kRowBlocks = kRows_ == 16 ? 1 : 2;  // 16-row blocks of a warp
  // Two warps of 32 keys in a step where memory binds and a CTA's beginning and end are most of its life:
  // more CTAs hide each other's.
  static constexpr int kWarps =
      (kDim == 64 && kRows_ == 16) || (kDim == 128 && kRows_ == 32) ? 2 : 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSplit = kDim == 256 ? 2 : 1;  // warps that share O's columns
  static constexpr int kRowWarps = kTileM / (16 * kRowBlocks);
  static constexpr int kKeyWarps = kWarps / (kRowWarps * kSplit);
  // Where keys are divided, what is in flight must hide the latency of memory: with 16 rows, whose
  // O is small, by more CTAs per SM, which also hide each other's beginnings and ends; with 32 by a
  // third stage. Where rows are divided, products hide it; at 128 dims scores of 64 keys would
  // leave O too few registers.
  static constexpr int kStep = kDim == 256 || (kDim == 128 && kKeyWarps == 1) ? 32 : 64;  // keys
  static constexpr int kWarpKeys = kStep / kKeyWarps;
  static constexpr int kStages = kKeyWarps == 1 ? (kDim == 128 ? 3 : 2)
                                 : kWarps == 2 || (kTileM == 16 && kDim >= 64) ? 2
                                                                               : 3;
  static constexpr int kMinCtas = kKeyWarps == 1                ? (kDim == 32 ? 3 : 2)
                                  : kDim == 32                  ? 6
                                  : kDim == 64                  ? (kTileM == 16 ? 6 : 3)
                                  : kTileM == 16 || kWarps == 2 ? 3
                                                                : 2;
  static constexpr bool kHoldsQ = kRowBlocks == 1 && kDim == 128;  // Q stays in registers
  static constexpr int kOutPitch = kDim + 8;  // rows of O: no two of 4 in the same banks
  static constexpr PathName kName =
      PathName("cuda.target.forward.mma_sync.d") + kDim + ".r" + kTileM;
  static_assert(kRowWarps * kKeyWarps * kSplit == kWarps && kWarpKeys % 16 == 0);
};

template <typename Config>
struct TargetForwardOperands {
  using Element = typename Config::Element;
  SharedTile<Element, Config::kTileM, Config::kDim> sQ;
  SharedTile<Element, Config::kStep, Config::kDim> sK[Config::kStages];
  SharedTile<Element, Config::kStep, Config::kDim> sV[Config::kStages];
};

template <typename Config>
struct TargetForwardStorage {
  union {
    TargetForwardOperands<Config> operands;
    alignas(16) float sOut[Config::kKeyWarps][Config::kTileM][Config::kOutPitch];
  };
  float sMax[Config::kKeyWarps][Config::kTileM];
  float sSum[Config::kKeyWarps][Config::kTileM];
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void target_forward(
    const __grid_constant__ TargetAttentionParams params) {
  using Element = typename Config::Element;
  constexpr int kDim = Config::kDim, kTileM = Config::kTileM, kStep = Config::kStep,
                kThreads = Config::kThreads, kStages = Config::kStages,
                kKeyWarps = Config::kKeyWarps, kRowBlocks = Config::kRowBlocks;
  constexpr int kScoreBlocks = Config::kWarpKeys / 8, kOutBlocks = kDim / Config::kSplit / 8;
  using KeysAddress = LaneAddress<SharedTile<Element, kStep, kDim>>;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<TargetForwardStorage<Config>*>(shared_bytes);
  auto& operands = shared.operands;

  ptx::griddepcontrol_launch_dependents();
  const int row_tiles =
      (params.num_queries * (params.heads / params.kv_heads) + kTileM - 1) / kTileM;
  const int tiles_of_chunk = row_tiles * params.kv_heads, tile = blockIdx.x % tiles_of_chunk;
  const TargetChunk chunk = find_chunk(params, blockIdx.x / tiles_of_chunk);
  if (chunk.seq < 0 || !chunk.exists) return;
  const int kv_head = tile / row_tiles, first_row = tile % row_tiles * kTileM;
  const TargetRows target(params, chunk.seq, kv_head);
  const int rows = min(kTileM, target.count() - first_row);
  const bool whole = chunk.whole || params.parts == nullptr;

  const Element* gK = row_of<Element>(params.k, chunk.first_key, kv_head);
  const Element* gV = row_of<Element>(params.v, chunk.first_key, kv_head);
  const uint64_t policy = ptx::l2_policy(/*is_read_once=*/row_tiles == 1);
  const auto load_step = [&](int step) {
    const int key = step * kStep, stage = step % kStages;
    if (key < chunk.keys) {
      load_tile<kThreads>(operands.sK[stage], gK + key * params.k.row_stride, params.k.row_stride,
                          chunk.keys - key, params.dim_qk, params.aligned, policy);
      load_tile<kThreads>(operands.sV[stage], gV + key * params.v.row_stride, params.v.row_stride,
                          chunk.keys - key, params.dim_v, params.aligned, policy);
    }
    ptx::cp_async_commit();
  };
  load_query_rows<kThreads>(operands.sQ, params.q, target, first_row, rows, params.dim_qk,
                            params.aligned);
  ptx::cp_async_commit();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load_step(step);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_warp = warp % kKeyWarps, warp_key = key_warp * Config::kWarpKeys;
  const int warp_row = warp / kKeyWarps % Config::kRowWarps * (kRowBlocks * 16);
  const int warp_column = warp / (kKeyWarps * Config::kRowWarps) * (kOutBlocks * 8);
  // At least a tiny positive number: with scale 0 all scores are equal, but a
  // masked one, -inf, must stay so.
  const float scale_log2 = fmaxf(fabsf(params.scale) * kLog2E, 1e-30f);
  if (Config::kHoldsQ) {
    ptx::cp_async_wait<kStages - 1>();
    __syncthreads();
  }
  const RowOperand<Config::kHoldsQ, kRowBlocks, SharedTile<Element, kTileM, kDim>> q_rows(
      operands.sQ, warp_row, lane);
  OnlineSoftmax<kRowBlocks> softmax;
  Accumulator<kRowBlocks, kOutBlocks> o = {};
#pragma unroll 1
  for (int step = 0; step * kStep < chunk.keys; ++step) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    load_step(step + kStages - 1);
    const int keys = chunk.keys - step * kStep - warp_key, stage = step % kStages;
    if (keys <= 0 || warp_row >= rows) continue;

    Accumulator<kRowBlocks, kScoreBlocks> s = {};
    mma_rows_by_rows(s, q_rows, KeysAddress::by_columns(operands.sK[stage], warp_key, lane));
    if (params.scale < 0.0f) {
      // The maximum of scale * S lies where -S is largest.
#pragma unroll
      for (int i = 0; i < kRowBlocks * kScoreBlocks * 4; ++i) {
        float& score = s[i / (kScoreBlocks * 4)][i / 4 % kScoreBlocks][i % 4];
        score = -score;
      }
    }
    if (keys < Config::kWarpKeys) {
#pragma unroll
      for (int i = 0; i < kRowBlocks * kScoreBlocks * 4; ++i) {
        const int block = i / 4 % kScoreBlocks;
        if (block * 8 + 2 * (lane % 4) + i % 2 >= keys) {
          s[i / (kScoreBlocks * 4)][block][i % 4] = -INFINITY;
        }
      }
    }
    float rescale[kRowBlocks][2];
    softmax.update(s, rescale, scale_log2);
    rescale_rows(o, rescale);
    mma_accumulator_by_columns(o, s, KeysAddress::by_rows(operands.sV[stage], warp_key, lane),
                               warp_column);
  }
  ptx::cp_async_wait<0>();

  softmax.finish();
#pragma unroll
  for (int i = 0; i < kRowBlocks * 2; ++i) {
    const int row = warp_row + 8 * i + lane / 4;
    if (warp_column == 0 && lane % 4 == 0) {
      shared.sMax[key_warp][row] = softmax.row_max[i / 2][i % 2];
      shared.sSum[key_warp][row] = softmax.row_sum[i / 2][i % 2];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowBlocks * 2; ++i) {
    const int row = warp_row + 8 * i + lane / 4;
    float maximum = -INFINITY;
#pragma unroll
    for (int other = 0; other < kKeyWarps; ++other)
      maximum = fmaxf(maximum, shared.sMax[other][row]);
    const float shift = maximum == -INFINITY ? 0.0f : maximum * scale_log2;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kKeyWarps; ++other)
      sum +=
          shared.sSum[other][row] * ptx::ex2_approx(shared.sMax[other][row] * scale_log2 - shift);
    const float weight = ptx::ex2_approx(softmax.row_max[i / 2][i % 2] * scale_log2 - shift) *
                         (!whole ? 1.0f : (sum == 0.0f ? 0.0f : 1.0f / sum));
    float* out = &shared.sOut[key_warp][row][warp_column + 2 * (lane % 4)];
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
      *reinterpret_cast<float2*>(out + block * 8) =
          make_float2(o[i / 2][block][i % 2 * 2] * weight, o[i / 2][block][i % 2 * 2 + 1] * weight);
    }
    if (key_warp == 0 && warp_column == 0 && lane % 4 == 0 && row < rows) {
      if (whole) {
        params.lse[target.index(first_row + row)] =
            sum == 0.0f ? -INFINITY : maximum * fabsf(params.scale) + logf(sum);
      } else {
        reinterpret_cast<float2*>(
            params.part_stats)[part_row(params, chunk.slot, kv_head, first_row + row)] =
            make_float2(maximum, sum);
      }
    }
  }
  __syncthreads();

  const int part_columns = round_up_to_8(params.dim_v), row_chunks = part_columns / 8;
  for (int index = threadIdx.x; index < rows * row_chunks; index += kThreads) {
    const int row = index / row_chunks, column = index % row_chunks * 8;
    float sum[8] = {};
#pragma unroll
    for (int other = 0; other < kKeyWarps; ++other) {
      const auto* part = reinterpret_cast<const float4*>(&shared.sOut[other][row][column]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = part[i];
        sum[4 * i] += four.x;
        sum[4 * i + 1] += four.y;
        sum[4 * i + 2] += four.z;
        sum[4 * i + 3] += four.w;
      }
    }
    if (!whole) {
      auto* part = reinterpret_cast<float4*>(
          params.parts + part_row(params, chunk.slot, kv_head, first_row + row) * part_columns +
          column);
      part[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      part[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      continue;
    }
    Element* gOut =
        static_cast<Element*>(params.out) + target.index(first_row + row) * params.dim_v + column;
    if (params.aligned) {
      *reinterpret_cast<uint4*>(gOut) =
          make_uint4(pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]),
                     pack<Element>(sum[4], sum[5]), pack<Element>(sum[6], sum[7]));
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < params.dim_v) gOut[e] = Element(sum[e]);
      }
    }
  }
}

template <typename Config>
cudaError_t launch_target_forward_rows(const TargetAttentionParams& params, cudaStream_t stream) {
  const int64_t row_tiles = (target_rows(params) + Config::kTileM - 1) / Config::kTileM;
  const cudaError_t error =
      launch<target_forward<Config>>(params, target_grid(params, row_tiles), Config::kThreads,
                                     sizeof(TargetForwardStorage<Config>), stream, Config::kName);
  if (error != cudaSuccess) return error;
  return launch_merge<merge_forward<typename Config::Element>>(params, stream);
}

template <typename Element>
cudaError_t launch_target_forward_mma_sync(const TargetAttentionParams& params,
                                           cudaStream_t stream) {
  return for_dim_and_rows(params, [&](auto dim, auto rows) {
    return launch_target_forward_rows<TargetForwardConfig<Element, dim.value, rows.value>>(params,
                                                                                           stream);
  });
}

}  // namespace jagged_cuda::attention
