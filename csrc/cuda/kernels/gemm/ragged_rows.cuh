// Storing rows of a matrix whose pitch is any number of elements, so that they begin anywhere.
//
// A warp writes 8 rows at a time to lines in shared memory, as far from a multiple of 16 bytes as
// they lie in global memory. From there whole granules of 16 bytes leave at once, those that a row
// does not fill element by element. Two 16-bit elements stay in one word: a row that begins in the
// middle of a word lies one element too early, and its granules are shifted by one on their way out.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/prim/wgmma.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

template <typename Element>
struct RaggedRows {
  static constexpr int kColumns = 64;  // at a time
  static constexpr int kGranule = 16 / sizeof(Element);
  static constexpr int kGranules = kColumns / kGranule;
  static constexpr bool kPairs = sizeof(Element) == 2;
  // Words in front of a line: the shift reads one.
  static constexpr int kFront = kPairs ? 4 : 0;
  // Room for the shift; lines of 16 bits in banks of their own.
  static constexpr int kLine = kPairs ? 44 : 72;
  static_assert(32 % kGranules == 0 && kLine % 4 == 0);

  alignas(16) uint32_t words[8 * kLine];

  // Stores a warp's 16 rows, [rows, columns] of which exist: `global` is the first, `pitch` elements
  // lead to the next. All lanes call it together.
  template <int kBlocks>
  __device__ __forceinline__ void store(const float (&sum)[kBlocks][4], Element* global, int pitch,
                                        int rows, int columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * half >= rows) return;
#pragma unroll
      for (int block = 0; block < kBlocks; block += kColumns / 8) {
        if (8 * block >= columns) break;
        const int exist = min(columns - 8 * block, kColumns);
        // Else the compiler computes all addresses of all parts before the first.
        const int line_pitch = ptx::opaque(pitch);
        Element* first = global + int64_t{8 * half} * line_pitch + 8 * block;
        __syncwarp();  // the rows before have been read
        write<kBlocks>(sum, half, block, first, line_pitch, exist);
        __syncwarp();  // the rows are there for all lanes
        store_granules(first, line_pitch, rows - 8 * half, exist);
        store_edges(first, line_pitch, rows - 8 * half, exist);
      }
    }
  }

 private:
  // Elements from a multiple of 16 bytes to where row `line` begins.
  __device__ __forceinline__ static int shift_of(const Element* first, int pitch, int line) {
    const uint32_t element =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) / sizeof(Element));
    return static_cast<int>((element + static_cast<uint32_t>(line) * static_cast<uint32_t>(pitch)) % kGranule);
  }

  template <int kBlocks>
  __device__ __forceinline__ void write(const float (&sum)[kBlocks][4], int half, int first_block,
                                        const Element* first, int pitch, int columns) {
    const int lane = threadIdx.x % 32, line = lane / 4, shift = shift_of(first, pitch, line);
    uint32_t* sLine = words + line * kLine + kFront;
    sLine += kPairs ? shift / 2 + lane % 4 : shift + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < kColumns / 8; ++block) {
      if (8 * block >= columns) break;
      const float left = sum[first_block + block][2 * half],
                  right = sum[first_block + block][2 * half + 1];
      if constexpr (kPairs) {
        sLine[4 * block] = pack<Element>(left, right);
      } else {
        sLine[8 * block] = __float_as_uint(left);
        sLine[8 * block + 1] = __float_as_uint(right);
      }
    }
  }

  // Granules that a row fills.
  __device__ __forceinline__ void store_granules(Element* first, int pitch, int rows,
                                                 int columns) const {
    const int lane = threadIdx.x % 32, elem = lane % kGranules * kGranule;
#pragma unroll
    for (int step = 0; step < 8; step += 32 / kGranules) {
      const int line = step + lane / kGranules, shift = shift_of(first, pitch, line);
      if (line < rows && elem >= shift && elem + kGranule <= shift + columns) {
        const uint32_t* sWords = words + line * kLine + kFront + elem * sizeof(Element) / 4;
        uint4 granule = *reinterpret_cast<const uint4*>(sWords);
        if constexpr (kPairs) {
          const int bits = shift % 2 * 16;
          const uint32_t before = sWords[-1];
          granule.w = __funnelshift_l(granule.z, granule.w, bits);
          granule.z = __funnelshift_l(granule.y, granule.z, bits);
          granule.y = __funnelshift_l(granule.x, granule.y, bits);
          granule.x = __funnelshift_l(before, granule.x, bits);
        }
        ptx::st_global_16(first + int64_t{line} * pitch + elem - shift, granule);
      }
    }
  }

  // The elements before the first and behind the last of them.
  __device__ __forceinline__ void store_edges(Element* first, int pitch, int rows,
                                              int columns) const {
    constexpr int kLanes = 2 * kGranule;  // for a row
    const int lane = threadIdx.x % 32, place = lane % kGranule;
    const bool is_tail = lane % kLanes >= kGranule;
#pragma unroll
    for (int step = 0; step < 8; step += 32 / kLanes) {
      const int line = step + lane / kLanes, shift = shift_of(first, pitch, line);
      const int last = shift + columns, tail = last / kGranule * kGranule;
      const bool exists = is_tail ? tail > 0 || shift == 0 : shift > 0;
      const int elem = (is_tail ? tail : 0) + place;
      if (line < rows && exists && elem >= shift && elem < last) {
        const Element* sElements = reinterpret_cast<const Element*>(words + line * kLine + kFront);
        first[int64_t{line} * pitch + elem - shift] = sElements[elem - (kPairs ? shift % 2 : 0)];
      }
    }
  }
};

}  // namespace jagged_cuda::gemm
