// How results leave registers.
#pragma once

#include "cuda/kernels/attention/mma_tile.cuh"
#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

template <typename Element>
__device__ __forceinline__ Element* row_of(const HeadsView& view, int64_t row, int head) {
  return static_cast<Element*>(view.data) + row * view.row_stride + head * view.head_stride;
}

// Writes a warp's 16 rows, each times its scale, straight from registers: the quads of lanes that
// share a row exchange their elements, so that each lane writes 16 bytes. `g` is the row of this
// lane's first half, `rows` how many exist from there on.
template <typename Element, int kBlocks>
__device__ __forceinline__ void store_quads(const Accumulator<1, kBlocks>& o,
                                            const float (&scale)[2], Element* g, int64_t row_stride,
                                            int rows, int columns, int lane) {
  static_assert(kBlocks % 4 == 0);
  const int quad_lane = lane % 4;
  const bool odd = quad_lane % 2 != 0, high = quad_lane >= 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Element* row = g + half * 8 * row_stride + quad_lane * 8;
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {
      // words[b] of lane t is word t of the 16 bytes of block b; wanted: lane t has those of block
      // t.
      uint32_t words[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        words[b] = pack<Element>(o[0][first + b][2 * half] * scale[half],
                                 o[0][first + b][2 * half + 1] * scale[half]);
      }
#pragma unroll
      for (int pair = 0; pair < 4; pair += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? words[pair] : words[pair + 1], 1);
        (odd ? words[pair] : words[pair + 1]) = other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
        (high ? words[i] : words[i + 2]) = other;
      }
      if (half * 8 < rows && first * 8 + quad_lane * 8 < columns) {
        *reinterpret_cast<uint4*>(row + first * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// The same of f32, whose quads of lanes write 32 bytes of a row at a time as they are.
template <int kBlocks>
__device__ __forceinline__ void store_pairs(const Accumulator<1, kBlocks>& o,
                                            const float (&scale)[2], float* g, int64_t row_stride,
                                            int rows, int columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = g + half * 8 * row_stride + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (half * 8 < rows && block * 8 + lane % 4 * 2 < columns) {
        *reinterpret_cast<float2*>(row + block * 8) = make_float2(
            o[0][block][2 * half] * scale[half], o[0][block][2 * half + 1] * scale[half]);
      }
    }
  }
}

}  // namespace jagged_cuda::attention
