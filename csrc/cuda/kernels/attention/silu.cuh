// The score function of jagged_hstu_attention: silu(z) = z sigmoid(z), in the place of softmax.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// A score that counts as hidden: its sigmoid is exactly 0, and with it silu and its slope.
constexpr float kHiddenScore = -1e30f;

// What the sums of a sequence are divided by.
template <typename T>
__device__ __forceinline__ T silu_divisor(const AttentionParams& params, int64_t num_keys) {
  if (params.divisor != 0.0) return static_cast<T>(params.divisor);
  return static_cast<T>(num_keys > 0 ? num_keys : 1);
}

// What a row's sum of silu(z) v is multiplied by. `global_row` is a row of q.
template <typename T>
__device__ __forceinline__ T row_weight(const AttentionParams& params, int64_t global_row,
                                        int64_t num_keys) {
  const T factor =
      params.row_scale == nullptr ? T(1) : static_cast<const T*>(params.row_scale)[global_row];
  return factor / silu_divisor<T>(params, num_keys);
}

__device__ __forceinline__ float sigmoid(float z) {
  return ptx::rcp_approx(1.0f + ptx::ex2_approx(-kLog2E * z));
}

// Of f32 operands, whose results must be exact to the last bits.
template <typename T>
__device__ __forceinline__ T precise_sigmoid(T z) {
  return T(1) / (T(1) + exp(-z));
}

// The slope of silu, where sigmoid(z) is `gate`.
template <typename T>
__device__ __forceinline__ T silu_slope(T z, T gate) {
  return gate * (T(1) + z * (T(1) - gate));
}

// Calls change(score) for each element.
template <int kRowBlocks, int kBlocks, typename Change>
__device__ __forceinline__ void for_each_score(Accumulator<kRowBlocks, kBlocks>& s, Change change) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) change(s[r][block][i]);
    }
  }
}

}  // namespace jagged_cuda::attention
