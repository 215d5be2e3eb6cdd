// Storing f32 rows of a matrix whose pitch is any number of elements, so that they begin anywhere.
//
// A warp writes 8 rows at a time to lines in shared memory, as far from a multiple of 16 bytes as
// they lie in global memory. From there whole granules of 16 bytes leave at once, those that a row
// does not fill element by element.
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

struct RaggedRows {
  static constexpr int kColumns = 64;  // at a time
  static constexpr int kGranule = 4;   // elements of 16 bytes
  static constexpr int kGranules = kColumns / kGranule;
  static constexpr int kLine = kColumns + 8;  // room for the shift; banks of 4 lines differ
  static_assert(32 % kGranules == 0 && kLine % 32 == 8);

  alignas(16) float lines[8 * kLine];

  // Stores a warp's 16 rows, [rows, columns] of which exist: `global` is the first, `pitch` elements
  // lead to the next. All lanes call it together.
  template <int kBlocks>
  __device__ __forceinline__ void store(const float (&sum)[kBlocks][4], float* global, int pitch,
                                        int rows, int columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (8 * half >= rows) return;
#pragma unroll
      for (int block = 0; block < kBlocks; block += kColumns / 8) {
        if (8 * block >= columns) break;
        const int exist = min(columns - 8 * block, kColumns);
        float* first = global + int64_t{8 * half} * pitch + 8 * block;
        __syncwarp();  // the rows before have been read
        write<kBlocks>(sum, half, block, first, pitch, exist);
        __syncwarp();  // the rows are there for all lanes
        store_granules(first, pitch, rows - 8 * half, exist);
        store_edges(first, pitch, rows - 8 * half, exist);
      }
    }
  }

 private:
  // Elements from a multiple of 16 bytes to where row `line` begins.
  __device__ __forceinline__ static int shift_of(const float* first, int pitch, int line) {
    const auto element = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) / sizeof(float));
    const uint32_t distance = static_cast<uint32_t>(line) * static_cast<uint32_t>(pitch);
    return static_cast<int>((element + distance) % kGranule);
  }

  template <int kBlocks>
  __device__ __forceinline__ void write(const float (&sum)[kBlocks][4], int half, int first_block,
                                        const float* first, int pitch, int columns) {
    const int lane = threadIdx.x % 32, line = lane / 4;
    float* sPair = lines + line * kLine + shift_of(first, pitch, line) + lane % 4 * 2;
#pragma unroll
    for (int block = 0; block < kColumns / 8; ++block) {
      if (8 * block >= columns) break;
      sPair[8 * block] = sum[first_block + block][2 * half];
      sPair[8 * block + 1] = sum[first_block + block][2 * half + 1];
    }
  }

  // Granules that a row fills.
  __device__ __forceinline__ void store_granules(float* first, int pitch, int rows,
                                                 int columns) const {
    const int lane = threadIdx.x % 32, elem = lane % kGranules * kGranule;
#pragma unroll
    for (int step = 0; step < 8; step += 32 / kGranules) {
      const int line = step + lane / kGranules, shift = shift_of(first, pitch, line);
      if (line < rows && elem >= shift && elem + kGranule <= shift + columns) {
        ptx::st_global_16(first + int64_t{line} * pitch + elem - shift,
                          *reinterpret_cast<const uint4*>(lines + line * kLine + elem));
      }
    }
  }

  // The elements before the first and behind the last of them.
  __device__ __forceinline__ void store_edges(float* first, int pitch, int rows,
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
        first[int64_t{line} * pitch + elem - shift] = lines[line * kLine + elem];
      }
    }
  }
};

}  // namespace jagged_cuda::gemm
