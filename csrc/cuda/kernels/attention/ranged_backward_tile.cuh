// What ranged_dq and ranged_dkdv (ranged_backward.cuh) both use: their tiles, the barriers of
// copies, and silu.
#pragma once

#include "cuda/kernels/attention/backward_tiles.cuh"
#include "cuda/kernels/attention/backward_wgmma.cuh"
#include "cuda/kernels/attention/logit_bias.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/prim/tanh.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

template <typename Element_, int kDim_, bool kSilu_, BiasKind kBias_>
struct RangedBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr bool kSilu = kSilu_;
  static constexpr BiasKind kBias = kBias_;
  static constexpr bool kBiased = kBias != BiasKind::kNone;
  // Else what is stored of silu is scaled and divided before it is rounded.
  static constexpr bool kHasFloatRange = std::is_same_v<Element, __nv_bfloat16>;
  // Whether dQ of a step is still computed while S of the next is: where few CTAs share an SM.
  static constexpr bool kOverlapsSteps = kDim == 128;
  // How store_zeros finds its places: by the other way loops of silu with 64 dims spill more (with all
  // biases less).
  static constexpr bool kZerosByOneIndex = kSilu && kDim == 64 && kBias != BiasKind::kAny;
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;  // queries or keys that a CTA owns
  static constexpr int kStep = 64;  // keys or queries of an iteration

  // CTAs per SM.
  static constexpr int kDqCtas = kDim == 128 ? 2 : kBias == BiasKind::kAny ? 3 : 4;
  static constexpr int kDkdvCtas = kDim == 128 || kBias == BiasKind::kAny ? 2 : 3;
  static constexpr int kTablesCtas = kDim == 128 ? 2 : 3;
  static constexpr PathName kName = PathName("cuda.attention.backward.wgmma.d") + kDim +
                                    (kSilu ? ".silu" : ".general") + (kBiased ? ".bias" : "");
  static_assert(kDim == 64 || kDim == 128);
};

// Barriers of copies: of the CTA's own rows, and of each stage.
struct CopyBarriers {
  uint64_t own;
  uint64_t full[2];

  // All threads of the CTA.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(own, 1);
      ptx::mbarrier_init(full[0], 1);
      ptx::mbarrier_init(full[1], 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }
};

// `shared` by an address that is known to be one for all lanes of a warp: with times, where there
// is much else, each lane would find the descriptors of products for itself.
template <typename Config, typename T>
__device__ __forceinline__ T& uniform(T& shared) {
  if constexpr (has_times(Config::kBias)) {
    return *static_cast<T*>(
        __cvta_shared_to_generic(__reduce_max_sync(0xffffffffu, ptx::shared_address(&shared))));
  } else {
    return shared;
  }
}

// silu of a logit z, and its slope, in as few instructions as there can be: with h = z / 2 and
// t = tanh(h) the one is h + h t and the other half of 1 + t + silu(z) (1 - t).
struct SiluOf {
  float value;
  float slope;  // 2 silu'(z) - 1

  __device__ __forceinline__ explicit SiluOf(float h) {
    const float t = ptx::tanh_approx(h);
    value = __fmaf_rn(h, t, h);
    slope = __fmaf_rn(value, 1.0f - t, t);
  }
  // Of a score that is hidden.
  static constexpr float kNoSlope = -1.0f;
};

// What logits are in: what the function of a score takes.
template <bool kSilu>
constexpr float kLogitUnit = kSilu ? 0.5f : kLog2E;

// dS of silu, to s: from the slopes x there and dP, (1 + x) dP; 1/2 is left to the sums, unless
// Element lacks the range.
template <typename Config, int kBlocks>
__device__ __forceinline__ void multiply_by_slopes(Accumulator<1, kBlocks>& s,
                                                   const Accumulator<1, kBlocks>& dp,
                                                   float slope_factor) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) {
    const float grad = dp[0][i / 4][i % 4];
    float& own = s[0][i / 4][i % 4];
    own = __fmaf_rn(own, grad, grad);
    if constexpr (!Config::kHasFloatRange) own *= slope_factor;
  }
}

}  // namespace jagged_cuda::attention
