// What is added to scores (contract/score_bias.h), and the used part of key sequences: components
// of the schedules that take them.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// The keys of a sequence that are used (AttentionParams::kv_lengths), out of `len`.
__device__ __forceinline__ int64_t used_keys(const AttentionParams& params, int64_t seq,
                                             int64_t len) {
  return params.kv_lengths.data == nullptr ? len : clamped_count(params.kv_lengths, seq, len);
}
__device__ __forceinline__ RowRange used_rows(const AttentionParams& params, int64_t seq) {
  RowRange kv = sequence_rows(params.kv_offsets, seq);
  kv.len = used_keys(params, seq, kv.len);
  return kv;
}

// The biases of one head of one sequence. Rows and keys are counted within it, and must be there.
template <typename T>
struct HeadBias {
  const ScoreBias& bias;
  bool any;
  const T* keys;
  const T* times;
  const int64_t* q_time;
  const int64_t* kv_time;
  const T* positions;
  int64_t shift;  // Lk - Lq

  __device__ __forceinline__ HeadBias(const AttentionParams& params, int head,
                                      const RowRange& queries, const RowRange& kv)
      : bias(params.bias),
        any(params.bias.any()),
        keys(nullptr),
        times(nullptr),
        q_time(nullptr),
        kv_time(nullptr),
        positions(nullptr),
        shift(kv.len - queries.len) {
    if (bias.kv_bias != nullptr)
      keys = static_cast<const T*>(bias.kv_bias) + kv.begin * bias.kv_heads +
             head / (params.heads / bias.kv_heads);
    if (bias.time_table != nullptr) {
      times = static_cast<const T*>(bias.time_table) +
              head / (params.heads / bias.time_heads) * bias.time_buckets;
      q_time = bias.q_time + queries.begin;
      kv_time = bias.kv_time + kv.begin;
    }
    if (bias.position_table != nullptr)
      positions = static_cast<const T*>(bias.position_table) +
                  head / (params.heads / bias.position_heads) * bias.position_buckets;
  }

  __device__ __forceinline__ int time_bucket(int64_t row, int64_t key) const {
    return bias.time_bucket(__ldg(q_time + row), __ldg(kv_time + key));
  }
  __device__ __forceinline__ int position_bucket(int64_t row, int64_t key) const {
    return bias.position_bucket(row + shift - key);
  }
  __device__ __forceinline__ T of(int64_t row, int64_t key) const {
    T sum = 0;
    if (keys != nullptr) sum += __ldg(keys + key * bias.kv_heads);
    if (times != nullptr) sum += __ldg(times + time_bucket(row, key));
    if (positions != nullptr) sum += __ldg(positions + position_bucket(row, key));
    return sum;
  }
};

// Scores become logits, scale * score + bias. Rows are queries, of which this lane's first is `row`
// out of `queries`; columns are keys from `key` on, out of `keys`.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void scale_and_bias(Accumulator<kRowBlocks, kBlocks>& s, float scale,
                                               const HeadBias<float>& bias, int64_t row,
                                               int64_t queries, int64_t key, int64_t keys,
                                               int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) s[r][i / 4][i % 4] *= scale;
  }
  if (!bias.any) return;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = min(row + 16 * r + i / 2 * 8, queries - 1),
                      column = min(key + block * 8 + 2 * (lane % 4) + i % 2, keys - 1);
        s[r][block][i] += bias.of(at, column);
      }
    }
  }
}

// The same where rows are keys and columns queries.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void scale_and_bias_transposed(Accumulator<kRowBlocks, kBlocks>& s,
                                                          float scale, const HeadBias<float>& bias,
                                                          int64_t key, int64_t keys, int64_t row,
                                                          int64_t queries, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) s[r][i / 4][i % 4] *= scale;
  }
  if (!bias.any) return;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = min(row + block * 8 + 2 * (lane % 4) + i % 2, queries - 1);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r)
        s[r][block][i] += bias.of(at, min(key + 16 * r + i / 2 * 8, keys - 1));
    }
  }
}

// --- the gradients of kv_bias

// Adds up rows of dS^T.
template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void add_rows(const Accumulator<kRowBlocks, kBlocks>& ds,
                                         float (&sums)[kRowBlocks][2]) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) sums[r][i % 4 / 2] += ds[r][i / 4][i % 4];
  }
}

// Writes the sums of a head, and begins anew. `rows` are those of the tile at global_row.
template <int kRowBlocks>
__device__ __forceinline__ void store_key_sums(const AttentionBackwardParams& params,
                                               float (&sums)[kRowBlocks][2], int64_t global_row,
                                               int warp_row, int rows, int head, int lane) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[r][half]);
      const int row = warp_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows)
        static_cast<float*>(params.key_sums)[(global_row + row) * params.heads + head] = sum;
      sums[r][half] = 0.0f;
    }
  }
}

// --- the gradients of tables

// The sums of a warp, of its own: nothing else reads or writes them.
template <typename T>
struct TableSums {
  T* times;      // [time_buckets]
  T* positions;  // [position_buckets]

  // Those of warp `warp` and head `head`, out of all in params.table_sums: [warps, H, buckets].
  __device__ __forceinline__ TableSums(const AttentionBackwardParams& params, int64_t warp,
                                       int head) {
    const ScoreBias& bias = params.bias;
    const int64_t line = warp * params.heads + head;
    times = bias.time_table == nullptr
                ? nullptr
                : static_cast<T*>(params.time_sums) + line * bias.time_buckets;
    positions = bias.position_table == nullptr
                    ? nullptr
                    : static_cast<T*>(params.position_sums) + line * bias.position_buckets;
  }

  // Adds dS of a warp's rows; rows and columns as in scale_and_bias.
  template <int kRowBlocks, int kBlocks>
  __device__ __forceinline__ void add(const HeadBias<T>& bias,
                                      const Accumulator<kRowBlocks, kBlocks>& ds, int64_t row,
                                      int64_t queries, int64_t key, int64_t keys, int lane) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int64_t at = min(row + 16 * r + 8 * half, queries - 1);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int64_t column = min(key + block * 8 + 2 * (lane % 4) + i, keys - 1);
            add(bias, at, column, half == 0 ? ds[r][block][i] : ds[r][block][2 + i]);
          }
        }
      }
    }
  }
  // Adds one dS per lane, 0 where a key is not seen. All 32 lanes together.
  __device__ __forceinline__ void add(const HeadBias<T>& bias, int64_t row, int64_t key, T value) {
    if (times != nullptr) add_to(times, bias.time_bucket(row, key), value);
    if (positions != nullptr) add_to(positions, bias.position_bucket(row, key), value);
  }

 private:
  // Lanes of the same bucket add up in a tree that their numbers alone decide, so that the same
  // values give the same bits.
  __device__ __forceinline__ static void add_to(T* sums, int bucket, T value) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    const unsigned peers = __match_any_sync(kAll, bucket), below = (1u << lane) - 1;
    int rank = __popc(peers & below);
    unsigned left = peers & ~below & ~(1u << lane);  // peers behind this lane, not yet added
    while (__any_sync(kAll, left != 0)) {
      const int next = __ffs(static_cast<int>(left));
      const T other = __shfl_sync(kAll, value, next == 0 ? lane : next - 1);
      if (next != 0) value += other;
      left &= ~__ballot_sync(kAll, rank % 2 == 1);
      rank /= 2;
    }
    if ((peers & below) == 0) sums[bucket] += value;
    __syncwarp();
  }
};

}  // namespace jagged_cuda::attention
