// Tiles of 16-bit elements from lines that begin at any address, by copies of aligned granules.
//
// The lines of a matrix with an odd pitch begin anywhere, and neither cp.async of 16 bytes nor
// ldmatrix takes such an address. So the granules of 16 bytes that hold a line are copied as they
// lie, to shared memory, where a line has room for one granule more than its elements. Once they have
// arrived, elements are picked from there (gemm/raw_lines.cuh), or shifted into place: a line belongs
// to neighbouring lanes of one warp, so no barrier beyond the warp's own is needed.
#pragma once

#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>

namespace jagged_cuda::gemm {

// Where a tensor lies, in bytes.
struct Extent {
  const char* begin;
  const char* end;

  // Whether the granules that hold [first, last) reach out of the tensor.
  __device__ __forceinline__ bool is_left_by(const void* first, const void* last) const {
    return reinterpret_cast<uintptr_t>(first) / 16 * 16 < reinterpret_cast<uintptr_t>(begin) ||
           (reinterpret_cast<uintptr_t>(last) + 15) / 16 * 16 > reinterpret_cast<uintptr_t>(end);
  }
};

// The part of a granule that lies within the tensor, zeros elsewhere.
__device__ __noinline__ inline uint4 load_granule_within(const char* granule,
                                                         const Extent& tensor) {
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = 0;
    for (int half = 0; half < 2; ++half) {
      const char* element = granule + 4 * i + 2 * half;
      if (element >= tensor.begin && element < tensor.end) {
        r[i] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(element)) << (16 * half);
      }
    }
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// Eight elements from the `shift`-th of two neighbouring granules on, zeros from `exist` on.
__device__ __forceinline__ uint4 shift_granules(const uint4& low, const uint4& high, int shift,
                                                int exist) {
  uint32_t r[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  // By 4, 2 and 1 elements: no register is indexed by a variable.
#pragma unroll
  for (int i = 0; i < 6; ++i) r[i] = shift & 4 ? r[i + 2] : r[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) r[i] = shift & 2 ? r[i + 1] : r[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = __funnelshift_r(r[i], r[i + 1], shift % 2 * 16);
  if (exist < 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] &= exist >= 2 * i + 2 ? 0xffffffffu : exist == 2 * i + 1 ? 0xffffu : 0u;
    }
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// A tile of kLines lines of kElems elements, kLine apart in shared memory, of which lines x elems
// exist at `global`. All kThreads call both functions together.
template <int kThreads, int kLines, int kElems, int kLine, typename Element>
struct ShiftedTile {
  static constexpr int kGranule = 8;  // elements
  static constexpr int kGranules = kElems / kGranule;
  static constexpr int kLineStep = kThreads / kGranules;
  static_assert(sizeof(Element) == 2 && kElems % kGranule == 0 && kLine % kGranule == 0);
  static_assert(kLine >= kElems + kGranule, "a line that begins within a granule needs one more");
  static_assert(32 % kGranules == 0, "a line belongs to one warp");
  static_assert(kThreads % kGranules == 0 && kLines % kLineStep == 0);

  // Starts the copies of all granules that hold an element of the tile.
  static __device__ __forceinline__ void copy(Element* sTile, const Element* global, int64_t stride,
                                              int lines, int elems, bool at_edge,
                                              const Extent& tensor) {
    const int first = threadIdx.x / kGranules, index = threadIdx.x % kGranules;
    const Element* source = global + first * stride;
#pragma unroll
    for (int step = 0; step < kLines; step += kLineStep) {
      const int line = first + step;
      const uintptr_t address = reinterpret_cast<uintptr_t>(source);
      const int last = static_cast<int>(address % 16 / 2) + elems;  // elements from granule 0 on
      const char* granule = reinterpret_cast<const char*>(address - address % 16) + 16 * index;
      Element* sGranule = &sTile[line * kLine + kGranule * index];
      if (line < lines && elems > 0 && kGranule * index < last) {
        copy_one(sGranule, granule, at_edge, tensor);
        if (index == kGranules - 1 && kElems < last) {
          copy_one(sGranule + kGranule, granule + 16, at_edge, tensor);
        }
      }
      source += kLineStep * stride;
    }
  }

  // Shifts the tile into place, zeros where no element exists. The calling thread's own copies must have
  // arrived; a barrier must follow before other warps read the tile.
  static __device__ __forceinline__ void shift_in_place(Element* sTile, const Element* global,
                                                        int64_t stride, int lines, int elems) {
    const int first = threadIdx.x / kGranules, index = threadIdx.x % kGranules;
    // Only the address within a granule counts.
    uint32_t element = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(global) / 2) +
                       static_cast<uint32_t>(first) * static_cast<uint32_t>(stride);
    __syncwarp();  // the granules of a line are there for all its lanes
#pragma unroll
    for (int step = 0; step < kLines; step += kLineStep) {
      const int line = first + step;
      uint4* sGranule = reinterpret_cast<uint4*>(&sTile[line * kLine + kGranule * index]);
      const int exist = line < lines ? elems - kGranule * index : 0;
      const uint4 shifted =
          shift_granules(sGranule[0], sGranule[1], element % kGranule, exist > 0 ? exist : 0);
      __syncwarp();  // the lane before has read this granule
      *sGranule = shifted;
      element += kLineStep * static_cast<uint32_t>(stride);
    }
  }

 private:
  static __device__ __forceinline__ void copy_one(Element* sGranule, const char* granule,
                                                  bool at_edge, const Extent& tensor) {
    if (at_edge) {
      *reinterpret_cast<uint4*>(sGranule) = load_granule_within(granule, tensor);
    } else {
      ptx::cp_async_16(sGranule, granule, 16);
    }
  }
};

}  // namespace jagged_cuda::gemm
