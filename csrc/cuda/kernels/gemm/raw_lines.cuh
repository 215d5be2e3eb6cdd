// Fragments of a 16-bit A operand from lines that begin at any address.
//
// The lines of a matrix with an odd pitch begin anywhere. The chunks of 16 bytes that hold them lie in
// shared memory as they were copied (gemm/shifted.cuh), and a warp picks its fragments from there:
// along a line a pair of elements is a word, or parts of two; across lines it is two elements.
#pragma once

#include "cuda/kernels/prim/shared_scalar.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

// Of A [64, K], a fragment [16, 16] for each warp of a warpgroup, as mma_m16n8k16 and wgmma take it.
// A line is a row of A, or, if kTranspose, element k of all rows. Lines are kLine elements apart, an
// odd number of chunks, so that what the lanes of a warp load lies in different banks.
template <typename Element, int kLine, bool kTranspose>
class RawLines {
 public:
  static_assert(sizeof(Element) == 2 && kLine % 8 == 0 && kLine / 8 % 2 == 1);

  // `shared` holds the lines that lie at `global`, `pitch` elements apart.
  __device__ __forceinline__ RawLines(const Element* shared, const Element* global, int64_t pitch) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, k = lane % 4 * 2;
    const auto first = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(global) / 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = kTranspose ? k + i : row + 8 * i;
      const uint32_t shift = (first + line * static_cast<uint32_t>(pitch)) % 8;
      const uint32_t elem = kTranspose ? shift + row : shift / 2 * 2 + k;
      addresses_[i] = ptx::shared_address(shared) + (line * kLine + elem) * 2;
      if constexpr (!kTranspose) shift_bits_[i] = shift % 2 * 16;
    }
  }

  // The fragment from `k` on, of lines that lie `offset_bytes` after the first; from `exist` on zeros.
  __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t offset_bytes, int k,
                                       int exist) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2 * 8;  // along K
      if constexpr (kTranspose) {
        const uint32_t offset = offset_bytes + ((k + half) * kLine + i % 2 * 8) * 2;
        a[i] = ptx::ld_shared_2(addresses_[0] + offset) | ptx::ld_shared_2(addresses_[1] + offset)
                                                              << 16;
      } else {
        const uint32_t address = addresses_[i % 2] + offset_bytes + (k + half) * 2;
        a[i] = __funnelshift_r(ptx::ld_shared_4(address), ptx::ld_shared_4(address + 4),
                               shift_bits_[i % 2]);
      }
    }
    if (k + 16 > exist) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int left = exist - (k + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2);
        a[i] = left >= 2 ? a[i] : left == 1 ? a[i] & 0xffffu : 0;
      }
    }
  }

 private:
  uint32_t addresses_[2];
  uint32_t shift_bits_[2];
};

}  // namespace jagged_cuda::gemm
