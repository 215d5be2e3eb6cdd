// What becomes of the scores of a warp's 16 rows: probabilities, by softmax. The Score of the forward
// kernel for long sequences (long_forward.cuh; silu in softmax's place is SiluScore of ranged_forward.cuh).
//
// Probabilities are relative to a reference m per row, which seldom moves (LazySoftmax in scores.cuh).
// A step is either
//     update()                           finds the maximum of the step, and moves m if it must
// or, without a maximum in most steps,
//     try_keeping(), try_guessing()      relative to m as it is, or to a guess; true where some lane sees
//                                        that m has fallen behind. Then, as all warps agree,
//     keep()                             counts the sums, if none has, or
//     move()                             takes the same scores once more, and m becomes their maximum.
#pragma once

#include "cuda/kernels/attention/scores.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

struct SoftmaxScore {
  static constexpr float kHidden = -INFINITY;
  const float scale, scale_log2;
  LazySoftmax softmax;
  float rescale[1][2], sums[2];

  // The scale is at least a tiny positive number: with scale 0 all scores are equal, but a masked
  // one, -inf, must stay so.
  __device__ __forceinline__ explicit SoftmaxScore(const AttentionParams& params)
      : scale(static_cast<float>(params.scale)), scale_log2(fmaxf(fabsf(scale) * kLog2E, 1e-30f)) {}

  __device__ __forceinline__ void reset() { softmax = LazySoftmax(); }

  __device__ __forceinline__ void begin_step() {}
  // Whether begin(), before what is hidden is replaced, or center(), behind that, changes scores.
  __device__ __forceinline__ bool changes() const { return scale < 0.0f; }
  template <int kBlocks>
  __device__ __forceinline__ void center(Accumulator<1, kBlocks>&) const {}

  // Before what is hidden is replaced. The maximum of scale * S lies where -S is largest, if the scale is
  // negative.
  template <int kBlocks>
  __device__ __forceinline__ void begin(Accumulator<1, kBlocks>& s) const {
    if (scale >= 0.0f) return;
#pragma unroll
    for (int e = 0; e < kBlocks * 4; ++e) s[0][e / 4][e % 4] = -s[0][e / 4][e % 4];
  }

  // Scores become the operand of the product with V, written after finish_output(). True where what
  // was summed so far is to be multiplied by `rescale`.
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(Accumulator<1, kBlocks>& s, Probs& p,
                                         FinishOutput finish_output) {
    return softmax.update(s, p, rescale, scale_log2, finish_output);
  }

  // Rows from `rows` on, of which `row` and the eighth behind it are this lane's, never have to move.
  __device__ __forceinline__ void hold_rows(int row, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= rows) softmax.reference[half] = INFINITY;
    }
  }

  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool try_keeping(const Accumulator<1, kBlocks>& s, Probs& p,
                                              FinishOutput finish_output) {
    softmax.try_keeping(s, p, sums, scale_log2, finish_output);
    return is_behind();
  }

  // For the first step, relative to the maximum over its first keys, or over all of them where some are
  // hidden (`is_cut`): those might be the first. Holds rows.
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool try_guessing(const Accumulator<1, kBlocks>& s, Probs& p,
                                               bool is_cut, int row, int rows,
                                               FinishOutput finish_output) {
    constexpr int kGuessedBlocks = 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[0][0][2 * half];
#pragma unroll
      for (int i = 1; i < 2 * kGuessedBlocks; ++i) top = fmaxf(top, s[0][i / 2][2 * half + i % 2]);
      softmax.reference[half] = is_cut ? LazySoftmax::maximum(s, half) : quad_max(top);
    }
    hold_rows(row, rows);
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // While a row has seen nothing, -inf - -inf would be NaN.
      shift[half] =
          softmax.reference[half] == -INFINITY ? 0.0f : softmax.reference[half] * scale_log2;
    }
    finish_output();
    LazySoftmax::exponentials(s, p, sums, shift, scale_log2);
    return is_behind();
  }

  __device__ __forceinline__ void keep() { softmax.keep(sums); }

  template <typename Probs, int kBlocks>
  __device__ __forceinline__ void move(const Accumulator<1, kBlocks>& s, Probs& p) {
    const bool behind[2] = {softmax.is_behind(sums[0]), softmax.is_behind(sums[1])};
    softmax.move(s, p, rescale, behind, scale_log2);
  }

  // The factors of the rows' sums, of which this lane has two: row global_row of q, `rows` of which
  // exist from there on, and the eighth behind it, 8 >> packed_shift rows of q further. Stores the LSE.
  __device__ __forceinline__ void finish(float (&factor)[2], const AttentionParams& params,
                                         int64_t global_row, int rows, int head, int, int lane,
                                         int packed_shift) {
    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum[half];
      factor[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && half * 8 < rows) {
        static_cast<float*>(
            params.lse)[(global_row + half * (8 >> packed_shift)) * params.heads + head] =
            sum == 0.0f
                ? -INFINITY
                : __fmaf_rn(softmax.reference[half], fabsf(scale), ptx::lg2_approx(sum) * kLn2);
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_behind() const {
    return softmax.is_behind(sums[0]) || softmax.is_behind(sums[1]);
  }
};

}  // namespace jagged_cuda::attention
