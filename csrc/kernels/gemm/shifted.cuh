// Eight 16-bit elements from any address, by loads of aligned 16-byte granules.
//
// The lines of a matrix with an odd pitch begin anywhere, and neither cp.async nor a vector load
// takes such an address. The two granules that hold the elements are loaded whole and shifted
// together in registers; the second one is the first one of the neighbouring thread, and comes from
// L1. A granule that reaches out of the tensor is not loaded whole.
#pragma once

#include <cstdint>

namespace jagged_cuda::gemm {

// Where a tensor lies, in bytes.
struct Extent {
  const char* begin;
  const char* end;
};

// The granules of kElems elements from `source` on, of which the first `exist` (at most kElems)
// lie in the tensor.
template <typename Element>
struct Granules {
  static_assert(sizeof(Element) == 2);
  static constexpr int kElems = 8;

  uint32_t words[8];  // both granules
  int shift;          // elements before the first one

  __device__ __forceinline__ void load(const Element* source, int exist, const Extent& tensor) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(source);
    shift = static_cast<int>(address % 16 / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* granule = reinterpret_cast<const char*>(address - address % 16) + 16 * half;
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (exist > 0 && shift + exist > 8 * half) {
        if (granule >= tensor.begin && granule + 16 <= tensor.end) {
          loaded = __ldg(reinterpret_cast<const uint4*>(granule));
        } else {
          loaded = load_partly(granule, tensor);
        }
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
    for (int i = 0; i < 4; ++i) {
      r[i] = __funnelshift_r(r[i], r[i + 1], shift & 1 ? 16 : 0);
      const uint32_t kept = exist >= 2 * i + 2 ? 0xffffffffu : exist == 2 * i + 1 ? 0xffffu : 0u;
      r[i] &= kept;
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
  }

 private:
  // A granule at the edge of the tensor, element by element.
  static __device__ __noinline__ uint4 load_partly(const char* granule, const Extent& tensor) {
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
