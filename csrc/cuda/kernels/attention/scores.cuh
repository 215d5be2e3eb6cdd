// Online softmax over tiles of scores in accumulators.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"

#include <cmath>

namespace jagged_cuda::attention {

// What is below hides: times log2(e) it would be -inf.
constexpr float kLeastMaximum = -2.3e38f;

// Of a maximum in units of log2. Up to it x * scale_log2 - shift, where one product is rounded and the
// other is not, is off by 2^-8 at most; beyond it, such as where biases of -1e9 meet all keys of a row,
// by 64 and more, so that P overflows or vanishes.
constexpr float kMostShift = 65536.0f;

// Of an LSE in size: from there on a float's neighbours are 2 apart.
constexpr float kMostLse = 16777216.0f;

// A row's LSE in units of log2, for P of the backward pass. Of a row all of whose keys a bias hides it
// is -inf: its P is 0. So is that of a row whose LSE is of more than `most` in size: that has lost what
// P is made of.
__device__ __forceinline__ float lse_in_log2(float lse, float most) {
  return fabsf(lse) > most ? INFINITY : lse * kLog2E;
}

// Running maximum and sum of the rows that a lane shares with the three others of its quad, [row
// block][half].
template <int kRowBlocks>
struct OnlineSoftmax {
  float row_max[kRowBlocks][2];
  float row_sum[kRowBlocks][2];  // of this lane's columns only, until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int row = 0; row < kRowBlocks * 2; ++row) {
      row_max[row / 2][row % 2] = -INFINITY;
      row_sum[row / 2][row % 2] = 0.0f;
    }
  }

  // Turns scores into probabilities relative to the new maximum; what was summed so far is to be
  // multiplied by `rescale`. kAnyShift: with biases, which may be of any size.
  template <bool kAnyShift = false, int kBlocks>
  __device__ __forceinline__ void update(Accumulator<kRowBlocks, kBlocks>& s,
                                         float (&rescale)[kRowBlocks][2], float scale_log2) {
#pragma unroll
    for (int row = 0; row < kRowBlocks * 2; ++row) {
      const int r = row / 2, half = row % 2;
      float tile_max = -INFINITY;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        tile_max = fmaxf(tile_max, fmaxf(s[r][block][2 * half], s[r][block][2 * half + 1]));
      }
      const float new_max = fmaxf(row_max[r][half], quad_max(tile_max));
      // While a row has seen nothing its maximum is -inf, and -inf - -inf would be NaN: subtract 0
      // instead. Likewise where a bias like the least float makes it -inf by log2(e).
      const float finite_max = new_max < kLeastMaximum ? 0.0f : new_max;
      float shift = finite_max * scale_log2;
      if (kAnyShift && __any_sync(0xffffffffu, fabsf(shift) > kMostShift)) {
        const float taken = fabsf(shift) > kMostShift ? finite_max : 0.0f;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          s[r][block][2 * half] -= taken;
          s[r][block][2 * half + 1] -= taken;
        }
        if (taken != 0.0f) shift = 0.0f;
      }
      // 1 to the last bit while the maximum stays: how many tiles a row is in of which it sees
      // nothing depends on the tiles' size, and so on the batch.
      rescale[r][half] = ptx::ex2_approx((row_max[r][half] - finite_max) * scale_log2);
      row_max[r][half] = new_max;
      float sum = 0.0f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          // Explicit, since whether the compiler fuses must not depend on the tile.
          s[r][block][i] = ptx::ex2_approx(__fmaf_rn(s[r][block][i], scale_log2, -shift));
          sum += s[r][block][i];
        }
      }
      row_sum[r][half] = __fmaf_rn(row_sum[r][half], rescale[r][half], sum);
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < kRowBlocks * 2; ++row)
      row_sum[row / 2][row % 2] = quad_sum(row_sum[row / 2][row % 2]);
  }
};

template <int kRowBlocks, int kBlocks>
__device__ __forceinline__ void rescale_rows(Accumulator<kRowBlocks, kBlocks>& o,
                                             const float (&rescale)[kRowBlocks][2]) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[r][block][i] *= rescale[r][i / 2];
    }
  }
}

// The same for one block of 16 rows, in fewer instructions. Probabilities are relative to a
// reference that follows the maximum only once it has fallen behind by a factor of 2^8: it cancels
// at the end, and sums are seldom rescaled. Whether it moves depends on the row alone.
//
// Cheaper still is a step that computes no maximum: try_keeping(), and then keep(), or move() from
// the same scores where is_behind() for some row. Then the factor is 2^12.
struct LazySoftmax {
  static constexpr float kSlackLog2 = 8.0f;
  static constexpr float kLimit = 4096.0f;  // of a lane's sum over a tile
  float reference[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // of this lane's columns only, until finish()

  template <int kBlocks>
  __device__ __forceinline__ static float maximum(const Accumulator<1, kBlocks>& s, int half) {
    constexpr int kChains = kBlocks < 4 ? kBlocks : 4;  // that need not wait for each other
    float chain[kChains];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float larger = fmaxf(s[0][block][2 * half], s[0][block][2 * half + 1]);
      float& top = chain[block % kChains];
      top = block < kChains ? larger : fmaxf(top, larger);
    }
    float top = fmaxf(chain[0], chain[1]);
    if constexpr (kChains == 4) top = fmaxf(top, fmaxf(chain[2], chain[3]));
    return quad_max(top);
  }

  // Probabilities, rounded, in p, and their sums before that, of this lane's columns.
  template <typename Probs, int kBlocks>
  __device__ __forceinline__ static void exponentials(const Accumulator<1, kBlocks>& s, Probs& p,
                                                      float (&sums)[2], const float (&shift)[2],
                                                      float scale_log2) {
    float sum[2][2] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          e[i] = ptx::ex2_approx(__fmaf_rn(s[0][block][2 * half + i], scale_log2, -shift[half]));
          sum[half][i] += e[i];
        }
        p.set(block, half, e);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = sum[half][0] + sum[half][1];
  }

  // Before update(), of scores of any size: from rows whose next reference is far from 0 takes it, `taken`,
  // which is exact for scores near it, and from their references, too. restore() behind it.
  template <int kBlocks>
  __device__ __forceinline__ void center(Accumulator<1, kBlocks>& s, float (&taken)[2],
                                         float scale_log2) {
    const float slack = kSlackLog2 / scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = maximum(s, half);
      const float next = top > reference[half] + slack ? top : reference[half];
      const bool is_far = next != -INFINITY && fabsf(next * scale_log2) > kMostShift;
      taken[half] = is_far ? next : 0.0f;
      reference[half] -= taken[half];
#pragma unroll
      for (int i = 0; i < kBlocks * 2; ++i) s[0][i / 2][2 * half + i % 2] -= taken[half];
    }
  }
  __device__ __forceinline__ void restore(const float (&taken)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] += taken[half];
  }

  // Turns scores into probabilities, rounded, in p, which is written after finish_output(). True
  // where what was summed so far is to be multiplied by `rescale`. kAnyShift as above: then `s` changes.
  template <bool kAnyShift = false, typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ bool update(Accumulator<1, kBlocks>& s, Probs& p,
                                         float (&rescale)[1][2], float scale_log2,
                                         FinishOutput finish_output) {
    const float slack = kSlackLog2 / scale_log2;
    float next[2], shift[2], sums[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = maximum(s, half);
      next[half] = top > reference[half] + slack ? top : reference[half];
      // While a row has seen nothing, -inf - -inf would be NaN.
      shift[half] = next[half] == -INFINITY ? 0.0f : next[half] * scale_log2;
    }
    if constexpr (kAnyShift) {
      if (__any_sync(0xffffffffu, fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kMostShift)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float taken = fabsf(shift[half]) > kMostShift ? next[half] : 0.0f;
          if (taken != 0.0f) shift[half] = 0.0f;
#pragma unroll
          for (int i = 0; i < kBlocks * 2; ++i) s[0][i / 2][2 * half + i % 2] -= taken;
        }
      }
    }
    finish_output();
    exponentials(s, p, sums, shift, scale_log2);
    const bool moved = __any_sync(0xffffffffu, next[0] != reference[0] || next[1] != reference[1]);
    if (moved) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rescale[0][half] = next[half] == reference[half]
                               ? 1.0f
                               : ptx::ex2_approx((reference[half] - next[half]) * scale_log2);
        reference[half] = next[half];
        row_sum[half] *= rescale[0][half];
      }
    }
    keep(sums);
    return moved;
  }

  // The same relative to the references as they stand; the sums count once they are kept.
  template <typename Probs, int kBlocks, typename FinishOutput>
  __device__ __forceinline__ void try_keeping(const Accumulator<1, kBlocks>& s, Probs& p,
                                              float (&sums)[2], float scale_log2,
                                              FinishOutput finish_output) const {
    const float shift[2] = {reference[0] * scale_log2, reference[1] * scale_log2};
    finish_output();
    exponentials(s, p, sums, shift, scale_log2);
  }
  // Whether a row's reference has fallen behind, by one of its lanes' sums: that is infinite, or
  // NaN, too where the row has no reference yet.
  __device__ __forceinline__ static bool is_behind(float sum) { return !(sum < kLimit); }
  __device__ __forceinline__ void keep(const float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] += sums[half];
  }
  // Probabilities once more; the references of the rows that one of their lanes says to be behind
  // become their maximum. What was summed so far is to be multiplied by `rescale`.
  template <typename Probs, int kBlocks>
  __device__ __forceinline__ void move(const Accumulator<1, kBlocks>& s, Probs& p,
                                       float (&rescale)[1][2], const bool (&behind)[2],
                                       float scale_log2) {
    const int quad = threadIdx.x % 32 / 4 * 4;
    float shift[2], sums[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool moves = (__ballot_sync(0xffffffffu, behind[half]) >> quad & 0xf) != 0;
      const float top = maximum(s, half);
      rescale[0][half] = 1.0f;
      if (moves && top > reference[half]) {
        rescale[0][half] = ptx::ex2_approx((reference[half] - top) * scale_log2);
        reference[half] = top;
      }
      row_sum[half] *= rescale[0][half];
      shift[half] = reference[half] == -INFINITY ? 0.0f : reference[half] * scale_log2;
    }
    exponentials(s, p, sums, shift, scale_log2);
    keep(sums);
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] = quad_sum(row_sum[half]);
  }
};

}  // namespace jagged_cuda::attention
