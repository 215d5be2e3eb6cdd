// Eight 16-bit elements from any address, by loads of aligned 16-byte granules.
//
// The lines of a matrix with an odd pitch begin anywhere, and neither cp.async nor a vector load
// takes such an address. The two granules that hold the elements are loaded whole and shifted
// together in registers; the second one is the first one of the neighbouring thread, and comes from
// L1.
#pragma once

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

// The granules of kElems elements from one address on.
template <typename Element>
struct Granules {
  static_assert(sizeof(Element) == 2);
  static constexpr int kElems = 8;

  uint32_t words[8];  // both granules
  int shift;          // elements before the first one

  // Loads the first `exist` elements, at most kElems. At the edge of a tensor a granule may reach
  // out of it: then its elements are loaded one by one.
  __device__ __forceinline__ void load(const Element* source, int exist, bool at_edge,
                                       const Extent& tensor) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(source);
    shift = static_cast<int>(address % 16 / 2);
    const char* granule = reinterpret_cast<const char*>(address - address % 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (half == 0 ? exist > 0 : shift + exist > kElems) {
        loaded = at_edge ? load_one_by_one(granule + 16 * half, tensor)
                         : __ldg(reinterpret_cast<const uint4*>(granule) + half);
      }
      words[4 * half] = loaded.x, words[4 * half + 1] = loaded.y;
      words[4 * half + 2] = loaded.z, words[4 * half + 3] = loaded.w;
    }
  }

  // The elements, and zeros in place of those that do not exist.
  __device__ __forceinline__ uint4 combine(int exist) const {
    uint32_t r[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] = words[i];
    // By 4, 2 and 1 elements: no register is indexed by a variable.
#pragma unroll
    for (int i = 0; i < 6; ++i) r[i] = shift & 4 ? r[i + 2] : r[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) r[i] = shift & 2 ? r[i + 1] : r[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = __funnelshift_r(r[i], r[i + 1], shift % 2 * 16);
    if (exist < kElems) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[i] &= exist >= 2 * i + 2 ? 0xffffffffu : exist == 2 * i + 1 ? 0xffffu : 0u;
      }
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
  }

 private:
  static __device__ __noinline__ uint4 load_one_by_one(const char* granule, const Extent& tensor) {
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
};

}  // namespace jagged_cuda::gemm
