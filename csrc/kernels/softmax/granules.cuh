// Rows of 16-bit elements by aligned granules of 16 bytes, forward.
//
// A row begins at any element; the granules that hold it are loaded as they lie, one for each of
// 1 to 32 lanes, and what they hold of other rows is masked. Several rows stand beside each other
// in a warp, and kRowGroups such groups are loaded before the first is computed. A granule that is
// the row's own leaves as a whole, one that it shares with another row element by element.
//
// Where in its granules a row begins depends on the sequences before it, and with it which elements
// a lane adds. So exponentials, which are no larger than 1, are added as integers, in units of
// 2^-23: in whatever order, the same sum. A NaN is no integer and is looked for apart.
#pragma once

#include "kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

constexpr int kGranuleElems = 8;
constexpr int kRowGroups = 6;
// So that 32 granules hold a row wherever it begins.
constexpr int kMaxGranuleColumns = 32 * kGranuleElems - (kGranuleElems - 1);

__device__ __forceinline__ bool is_granule_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename Element>
using Granule = Vector<Element, kGranuleElems>;

// The granule at `global`, of which elements [begin, end) are wanted and `exist` exist.
template <typename Element>
__device__ __forceinline__ Granule<Element> load_granule(const Element* global, int begin, int end,
                                                         int64_t exist) {
  Granule<Element> granule;
  if (begin < end && exist >= kGranuleElems) {
    *reinterpret_cast<uint4*>(&granule) = __ldg(reinterpret_cast<const uint4*>(global));
  } else {
#pragma unroll
    for (int e = 0; e < kGranuleElems; ++e) {
      granule.elems[e] = e >= begin && e < end ? global[e] : Element(0.0f);
    }
  }
  return granule;
}

// `rows` rows of `columns` elements from element `first` of `gX` and `gOut`, both aligned to 16
// bytes, on. `capacity` elements exist. All lanes of a warp call it together.
template <typename Element>
__device__ __forceinline__ void softmax_granules(const Element* gX, Element* gOut, int64_t capacity,
                                                 int64_t first, int rows, int columns,
                                                 float scale) {
  static_assert(sizeof(Element) == 2);
  constexpr uint32_t kOne = 0x3f800000;  // 1.0f
  const int lane = threadIdx.x % 32;
  int lanes = 1;
  while (lanes * kGranuleElems < columns + kGranuleElems - 1) lanes *= 2;
  const int abreast = 32 / lanes, own_row = lane / lanes, own_granule = lane % lanes;
  const unsigned own_lanes = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << (own_row * lanes);
  const float scale_log2 = scale * 1.44269504f;

#pragma unroll 1
  for (int row = own_row; row - own_row < rows; row += kRowGroups * abreast) {
    Granule<Element> granules[kRowGroups];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int64_t start = first + (row + group * abreast) * columns;
      const int begin = static_cast<int>(start % kGranuleElems) - own_granule * kGranuleElems;
      const int end = row + group * abreast < rows ? begin + columns : begin;
      granules[group] = load_granule(gX + start - begin, max(begin, 0), min(end, kGranuleElems),
                                     capacity - (start - begin));
    }
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      if (row - own_row + group * abreast >= rows) break;
      const int64_t start = first + (row + group * abreast) * columns;
      const int begin = static_cast<int>(start % kGranuleElems) - own_granule * kGranuleElems;
      const int end = row + group * abreast < rows ? begin + columns : begin;
      float z[kGranuleElems];
      float maximum = minus_infinity<float>();
#pragma unroll
      for (int e = 0; e < kGranuleElems; ++e) {
        const float x = to_sum(granules[group].elems[e]);
        z[e] = e >= begin && e < end ? x * scale_log2 : minus_infinity<float>();
        maximum = fmaxf(maximum, z[e]);
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
      }
      float check = 0.0f;
      uint32_t sum = 0;
#pragma unroll
      for (int e = 0; e < kGranuleElems; ++e) {
        z[e] = ptx::ex2_approx(z[e] - maximum);
        check += z[e];
        sum += __float_as_uint(z[e] + 1.0f) - kOne;
      }
      const unsigned wrong = __ballot_sync(0xffffffffu, check != check);
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      float inverse = __fdividef(8388608.0f, static_cast<float>(sum));
      if ((wrong & own_lanes) != 0) inverse = __uint_as_float(0x7fffffff);  // NaN
      Granule<Element> result;
#pragma unroll
      for (int e = 0; e < kGranuleElems; ++e) result.elems[e] = from_sum<Element>(z[e] * inverse);
      Element* gGranule = gOut + start - begin;
      if (begin <= 0 && end >= kGranuleElems) {
        *reinterpret_cast<uint4*>(gGranule) = *reinterpret_cast<const uint4*>(&result);
      } else {
#pragma unroll
        for (int e = 0; e < kGranuleElems; ++e) {
          if (e >= begin && e < end) gGranule[e] = result.elems[e];
        }
      }
    }
  }
}

}  // namespace jagged_cuda::softmax
