// Which elements are dropped (contract/dropout.h).
#pragma once

#include "contract/dropout_words.h"
#include "cuda/kernels/norm/lanes.cuh"

namespace jagged_cuda::norm {

// Of a thread's vectors.
template <typename Config>
struct Draws {
  static constexpr int kVector = Config::kVector, kCount = Config::kRows * Config::kItems;
  static_assert(kDropoutColumns % kVector == 0);
  uint32_t words[kCount][kDropoutWords];

  __device__ __forceinline__ Draws(const Params& params, uint64_t seed, const Place<Config>& place,
                                   int64_t first_row) {
    if (params.seed == nullptr) {
#pragma unroll
      for (int i = 0; i < kCount * kDropoutWords; ++i) {
        words[i / kDropoutWords][i % kDropoutWords] = 0xffffffffu;
      }
      return;
    }
    DropoutPlace places[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = place.column + i % Config::kItems * place.apart;
      places[i] = {first_row + i / Config::kItems * place.step, column / kDropoutColumns};
    }
    dropout_words(words, seed, places);
    if constexpr (kVector < kDropoutColumns) {
      // A vector of 4 takes the first or the second half of its counter's words.
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = place.column + i % Config::kItems * place.apart;
        const bool second = column % kDropoutColumns != 0;
        words[i][0] = second ? words[i][2] : words[i][0];
        words[i][1] = second ? words[i][3] : words[i][1];
      }
    }
  }
  __device__ __forceinline__ float keep(float value, int r, int i, int e,
                                        uint32_t drop_up_to) const {
    const uint32_t half = dropout_half(words[r * Config::kItems + i][e / 2], e);
    return half <= drop_up_to ? 0.0f : value;
  }
};

// What a draw is compared with: without a seed every half is larger.
__device__ __forceinline__ uint32_t drop_up_to(const Params& params) {
  return params.seed == nullptr ? 0 : params.drop_up_to;
}

__device__ __forceinline__ float kept_scale(const Params& params) {
  return params.seed == nullptr ? 1.0f : static_cast<float>(params.kept_scale);
}

// The factor of one element.
template <typename Element>
__device__ __forceinline__ Sum<Element> keep_one(const Params& params, int64_t row,
                                                 int64_t column) {
  using S = Sum<Element>;
  if (params.seed == nullptr) return S(1);
  uint32_t words[1][kDropoutWords];
  dropout_words(words, static_cast<uint64_t>(*params.seed), {{row, column / kDropoutColumns}});
  const int place = static_cast<int>(column % kDropoutColumns);
  const uint32_t low = place < 2 ? words[0][0] : words[0][1];
  const uint32_t high = place < 6 ? words[0][2] : words[0][3];
  const uint32_t half = dropout_half(place < 4 ? low : high, place);
  return half <= params.drop_up_to ? S(0) : static_cast<S>(params.kept_scale);
}

}  // namespace jagged_cuda::norm
