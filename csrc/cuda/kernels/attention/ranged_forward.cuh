// The forward kernel for long sequences (long_forward.cuh) with ranges of keys, used parts, kv_bias or position_bias,
// and with silu in softmax's place.
#pragma once

#include "cuda/kernels/attention/long_forward.cuh"
#include "cuda/kernels/attention/ranged_forward_consumer.cuh"
#include "cuda/kernels/attention/row_ranges.cuh"
#include "cuda/kernels/attention/silu.cuh"
#include "cuda/kernels/attention/starting_bias.cuh"
#include "cuda/kernels/attention/starting_times.cuh"
#include "cuda/kernels/prim/tanh.cuh"

#include <type_traits>

namespace jagged_cuda::attention {

// What window, lengths and ranges hide of an item (row_ranges.cuh); read from shared memory each
// time, since registers are short.
template <int kTileM, int kTileN>
class RangesMask {
 public:
  using Shared = TileKeys<kTileM>;
  static constexpr bool kPrepared = true;

  __device__ __forceinline__ static void prepare(Shared& keys, const AttentionParams& params,
                                                 const QueryTile& tile) {
    keys.find(params, tile, kTileN);
  }

  __device__ __forceinline__ RangesMask(const AttentionParams&, const QueryTile&,
                                        const Shared& keys, int = 0)
      : keys_(keys) {}
  __device__ __forceinline__ int first() const { return keys_.steps.first; }
  __device__ __forceinline__ int next(int key) const { return keys_.steps.next(key, kTileN); }
  __device__ __forceinline__ int last() const { return keys_.steps.last; }
  __device__ __forceinline__ int own_last(int warpgroup) const { return keys_.last[warpgroup]; }
  __device__ __forceinline__ bool is_uncut(int warp, int key) const {
    return keys_.warps[warp].see(key, kTileN);
  }
  template <int kBlocks, typename OwnRow>
  __device__ __forceinline__ void hide(Accumulator<1, kBlocks>& s, float value, bool is_uncut,
                                       int key, int, OwnRow own_row, int lane) const {
    if (!is_uncut) replace_unseen(s, value, keys_.rows + own_row(), key, lane);
  }

 private:
  const Shared& keys_;
};

// As softmax has them where biases of any size may have been added: is_large where one of them, in this
// step or an earlier one of its item, is too large for a reference in units of log2. Those
// scores are centred in front, so that one body serves and nothing stands between its maxima and its
// exponentials: those of one row run beside the other's.
struct BiasedSoftmaxScore : SoftmaxScore {
  using SoftmaxScore::SoftmaxScore;
  bool is_large = true;
  float taken[2];  // from scores and references of this step
  __device__ __forceinline__ void begin_step() { taken[0] = taken[1] = 0.0f; }
  __device__ __forceinline__ bool changes() const { return scale < 0.0f || is_large; }
  template <int kBlocks>
  __device__ __forceinline__ void center(Accumulator<1, kBlocks>& s) {
    if (is_large) softmax.center(s, taken, scale_log2);
  }
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(Accumulator<1, kBlocks>& s, Probs& p,
                                         FinishOutput finish_output) {
    finish_output();
    const bool moved = softmax.update<false>(s, p, rescale, scale_log2, [] {});
    softmax.restore(taken);
    return moved;
  }
};

// The same where nobody says whether biases are large.
struct AnyBiasSoftmaxScore : SoftmaxScore {
  using SoftmaxScore::SoftmaxScore;
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(Accumulator<1, kBlocks>& s, Probs& p,
                                         FinishOutput finish_output) {
    return softmax.update<true>(s, p, rescale, scale_log2, finish_output);
  }
};

// Scores of a warp's 16 rows as silu has them, z / 2 + z / 2 tanh(z / 2): one special function.
struct SiluScore {
  static constexpr float kHidden = 0.0f;
  const float half_scale;
  float rescale[1][2];

  __device__ __forceinline__ explicit SiluScore(const AttentionParams& params)
      : half_scale(0.5f * static_cast<float>(params.scale)) {}

  __device__ __forceinline__ void reset() {}
  __device__ __forceinline__ void begin_step() {}
  __device__ __forceinline__ bool changes() const { return false; }
  template <int kBlocks>
  __device__ __forceinline__ void center(Accumulator<1, kBlocks>&) const {}
  template <int kBlocks>
  __device__ __forceinline__ void begin(Accumulator<1, kBlocks>&) const {}
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(const Accumulator<1, kBlocks>& s, Probs& p,
                                         FinishOutput finish_output) {
    finish_output();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float silu[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float z = s[0][block][2 * half + i] * half_scale;
          silu[i] = __fmaf_rn(z, ptx::tanh_approx(z), z);
        }
        p.set(block, half, silu);
      }
    }
    return false;
  }
  __device__ __forceinline__ void finish(float (&factor)[2], const AttentionParams& params,
                                         int64_t global_row, int rows, int, int num_keys, int,
                                         int) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows outside all sequences have no keys, and perhaps NaN as their scale.
      factor[half] = num_keys > 0 && half * 8 < rows
                         ? row_weight<float>(params, global_row + half * 8, num_keys)
                         : 0.0f;
    }
  }
};

template <typename Element, int kDim, bool kSilu, bool kKeys, bool kPositions>
struct RangedForwardConfig : LongForwardConfig<Element, kDim> {
  using Base = LongForwardConfig<Element, kDim>;
  template <typename Config>
  using Consumer = RangedForwardConsumer<Config>;
  static constexpr bool kBiased = kKeys || kPositions;
  static constexpr int kItems = 4;  // since finding what rows see takes a while
  static constexpr bool kKeepsReference = false;
  using Mask = RangesMask<Base::kTileM, Base::kTileN>;
  using Score = std::conditional_t<kSilu, SiluScore,
                                   std::conditional_t<kBiased, BiasedSoftmaxScore, SoftmaxScore>>;
  using Bias = std::conditional_t<
      kBiased, StartingBias<Base::kTileM, Base::kTileN, Base::kSlots, kKeys, kPositions>, NoBias>;
  static constexpr PathName kName =
      Base::kName + (kSilu ? ".silu" : ".general") + (kBiased ? ".bias" : "");
};

// With time_bias alone: fewer rows, and at 128 dims fewer keys, for registers and shared memory.
template <typename Element, int kDim, bool kSilu>
struct TimedForwardConfig : RangedForwardConfig<Element, kDim, kSilu, false, false> {
  using Base = RangedForwardConfig<Element, kDim, kSilu, false, false>;
  static constexpr int kWarpgroups = 2, kWriters = 2;
  static constexpr int kTileM = kWarpgroups * 64, kTileN = kDim == 64 ? 128 : 64;
  static constexpr int kThreads = (1 + kWarpgroups + kWriters) * 128;
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 160, kWriterRegisters = 64;
  using Mask = RangesMask<kTileM, kTileN>;
  using Score = std::conditional_t<kSilu, SiluScore, AnyBiasSoftmaxScore>;
  using Bias = StartingTimes<kTileM, kTileN>;
  static constexpr PathName kName = Base::kName + ".times";
};

template <typename Element>
cudaError_t launch_forward_ranged(const AttentionParams& params, cudaStream_t stream) {
  const auto launch = [&](auto config) {
    using Config = decltype(config);
    const cudaError_t error =
        launch_plan<Config::kTileM, AttentionParams>(params.split_by_length, params, stream);
    return error == cudaSuccess ? launch_long_forward<Config>(params, stream) : error;
  };
  const auto launch_silu = [&](auto dim, auto silu) {
    constexpr int kDim = dim.value;
    constexpr bool kSilu = silu.value != 0;
    if (params.bias.time_table != nullptr)
      return launch(TimedForwardConfig<Element, kDim, kSilu>());
    const auto launch_positions = [&](auto positions) {
      constexpr bool kPositions = positions.value != 0;
      return params.bias.kv_bias != nullptr
                 ? launch(RangedForwardConfig<Element, kDim, kSilu, true, kPositions>())
                 : launch(RangedForwardConfig<Element, kDim, kSilu, false, kPositions>());
    };
    return params.bias.position_table != nullptr ? launch_positions(Constant<1>{})
                                                 : launch_positions(Constant<0>{});
  };
  const auto launch_dim = [&](auto dim) {
    return params.silu ? launch_silu(dim, Constant<1>{}) : launch_silu(dim, Constant<0>{});
  };
  return params.dim_qk <= 64 && params.dim_v <= 64 ? launch_dim(Constant<64>{})
                                                   : launch_dim(Constant<128>{});
}

}  // namespace jagged_cuda::attention
