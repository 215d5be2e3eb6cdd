// Rows of 16-bit elements by aligned granules of 16 bytes, forward.
//
// A row begins at any element; the granules that hold it are loaded as they lie, and what they hold
// of other rows is masked. Up to 8 lanes share a row, each with kGranules granules of it; the rows
// beside each other in a warp are a group, and several groups are loaded before the first is
// computed. A granule that is the row's own leaves as a whole, one that it shares with another row
// element by element.
//
// Where in its granules a row begins depends on the sequences before it, and with it which elements
// a lane adds. So exponentials, which are no larger than 1, are added as integers, in units of
// 2^-23: in whatever order, the same sum. The maximum is taken off before the scale is multiplied,
// so that its own exponential is 1 to the last bit. What is no number shows in the maximum.
#pragma once

#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

constexpr int kGranuleElems = 8;
constexpr int kGranuleLanes = 8;  // that share a row, unless it is shorter than one granule of each
constexpr int kMaxGranules = 4;   // of a lane
// Columns that so many granules hold wherever the row begins.
constexpr int max_granule_columns(int granules) {
  return granules * kGranuleElems - (kGranuleElems - 1);
}
constexpr int kMaxGranuleColumns = max_granule_columns(kMaxGranules * kGranuleLanes);

__device__ __forceinline__ bool is_granule_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <typename Element>
using Granule = Vector<Element, kGranuleElems>;

// The part of a row that lies in one granule.
struct GranuleOfRow {
  int first;      // element at which the granule begins
  uint32_t mask;  // bit e: element e is the row's

  // Granule `index` of the row of `columns` elements from `start` on.
  __device__ __forceinline__ GranuleOfRow(int start, int columns, int index) {
    const int begin = start % kGranuleElems - index * kGranuleElems, end = begin + columns;
    first = start - begin;
    mask = below(end) & ~below(begin);
  }
  static __device__ __forceinline__ uint32_t below(int elem) {
    return (1u << min(max(elem, 0), kGranuleElems)) - 1;
  }
  __device__ __forceinline__ bool has(int elem) const { return (mask & (1u << elem)) != 0; }
  __device__ __forceinline__ bool is_whole() const { return mask == (1u << kGranuleElems) - 1; }
};

// `rows` rows of `columns` elements from element `first` of `gX` and `gOut` on, which are aligned
// to 16 bytes and have `exist` elements. `lanes` share a row. All lanes of a warp call it together.
template <int kGranules, typename Element>
__device__ __forceinline__ void softmax_granules(const Element* gX, Element* gOut, int exist,
                                                 int first, int rows, int columns, int lanes,
                                                 float scale) {
  static_assert(sizeof(Element) == 2);
  constexpr int kGroups = kGranules == 1 ? 6 : kGranules == 2 ? 3 : kGranules == 3 ? 2 : 1;
  const int lane = threadIdx.x % 32;
  const int abreast = 32 / lanes, own_row = lane / lanes, own_granule = lane % lanes;
  const float scale_log2 = fabsf(scale) * 1.44269504f;
  const uint32_t sign = scale < 0.0f ? 0x80000000u : 0u;

#pragma unroll 1
  for (int row = own_row; row - own_row < rows; row += kGroups * abreast) {
    Granule<Element> granules[kGroups][kGranules];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int group_row = row + group * abreast;
#pragma unroll
      for (int i = 0; i < kGranules; ++i) {
        const GranuleOfRow part(first + group_row * columns, group_row < rows ? columns : 0,
                                own_granule + i * lanes);
        Granule<Element>& granule = granules[group][i];
        if (part.mask != 0 && part.first + kGranuleElems <= exist) {
          *reinterpret_cast<uint4*>(&granule) =
              __ldg(reinterpret_cast<const uint4*>(gX + part.first));
        } else {
#pragma unroll
          for (int e = 0; e < kGranuleElems; ++e) {
            granule.elems[e] = part.has(e) ? gX[part.first + e] : Element(0.0f);
          }
        }
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int group_row = row + group * abreast;
      if (group_row - own_row >= rows) break;
      const int start = first + group_row * columns;
      const int own_columns = group_row < rows ? columns : 0;
      float x[kGranules][kGranuleElems];
      float maximum = minus_infinity<float>();
#pragma unroll
      for (int i = 0; i < kGranules; ++i) {
        const GranuleOfRow part(start, own_columns, own_granule + i * lanes);
#pragma unroll
        for (int e = 0; e < kGranuleElems; ++e) {
          x[i][e] = __uint_as_float(__float_as_uint(to_sum(granules[group][i].elems[e])) ^ sign);
          if (!part.has(e)) x[i][e] = minus_infinity<float>();
          maximum = ptx::max_nan(maximum, x[i][e]);
        }
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        maximum = ptx::max_nan(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
      }
      uint32_t sum = 0;
#pragma unroll
      for (int i = 0; i < kGranules; ++i) {
#pragma unroll
        for (int e = 0; e < kGranuleElems; ++e) {
          x[i][e] = ptx::ex2_approx((x[i][e] - maximum) * scale_log2);
          sum += __float_as_uint(x[i][e] + 1.0f);
        }
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      constexpr uint32_t kOne = 0x3f800000;  // 1.0f, with which each of the terms began
      sum -= static_cast<uint32_t>(lanes * kGranules * kGranuleElems) * kOne;
      // NaN where there is none, or an infinite one.
      const float inverse = __fdividef(8388608.0f, static_cast<float>(sum)) + (maximum - maximum);
#pragma unroll
      for (int i = 0; i < kGranules; ++i) {
        const GranuleOfRow part(start, own_columns, own_granule + i * lanes);
        Granule<Element> result;
#pragma unroll
        for (int e = 0; e < kGranuleElems; ++e) {
          result.elems[e] = from_sum<Element>(x[i][e] * inverse);
        }
        Element* gGranule = gOut + part.first;
        if (part.is_whole()) {
          *reinterpret_cast<uint4*>(gGranule) = *reinterpret_cast<const uint4*>(&result);
        } else {
#pragma unroll
          for (int e = 0; e < kGranuleElems; ++e) {
            if (part.has(e)) gGranule[e] = result.elems[e];
          }
        }
      }
    }
  }
}

// The same with as few granules a lane as hold a row; `first` may be any element of vectors of
// `capacity` elements, of which rows * columns must be an int.
template <typename Element>
__device__ __forceinline__ void softmax_by_granules(const Element* gX, Element* gOut,
                                                    int64_t capacity, int64_t first, int rows,
                                                    int columns, float scale) {
  constexpr int kLanes = kGranuleLanes, kMaxExist = 1 << 30;
  const int shift = static_cast<int>(first % kGranuleElems);
  gX += first - shift;
  gOut += first - shift;
  const int64_t left = capacity - (first - shift);
  const int exist = left < kMaxExist ? static_cast<int>(left) : kMaxExist;
  if (columns <= max_granule_columns(kLanes)) {
    int lanes = 1;
    while (max_granule_columns(lanes) < columns) lanes *= 2;
    softmax_granules<1>(gX, gOut, exist, shift, rows, columns, lanes, scale);
  } else if (columns <= max_granule_columns(2 * kLanes)) {
    softmax_granules<2>(gX, gOut, exist, shift, rows, columns, kLanes, scale);
  } else if (columns <= max_granule_columns(3 * kLanes)) {
    softmax_granules<3>(gX, gOut, exist, shift, rows, columns, kLanes, scale);
  } else {
    softmax_granules<4>(gX, gOut, exist, shift, rows, columns, kLanes, scale);
  }
}

}  // namespace jagged_cuda::softmax
