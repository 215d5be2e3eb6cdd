// What the products that write one matrix per sequence share: storing tiles at any alignment, and
// zeros where there is no matrix.
#pragma once

#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/prim/matrices.cuh"

#include <algorithm>
#include <cstdint>

namespace jagged_cuda::gemm {

// Where a warp turns 8 rows of its part of C, so that each row leaves as one run. 8 elements of
// padding keep both the writing of pairs and the reading of rows free of bank conflicts.
template <typename Config>
struct WarpRows {
  static constexpr int kLine = Config::kWarpTileN + 8;
  static_assert(Config::kWarpTileN == 32, "a lane stores one column");

  alignas(16) typename Config::Element sRows[8 * kLine];  // [8, kLine]
};

// Stores a warp's part of C, at (row, column) of the tile whose corner is `global`, [rows, columns]
// of which exist: row after row, 32 neighbouring elements at a time, since rows of a matrix with
// any pitch are aligned to nothing but their elements. All lanes call it together.
template <typename Config>
__device__ __forceinline__ void store_rows(const Accumulator<Config>& rAcc, WarpRows<Config>& warp,
                                           typename Config::Element* global, int64_t pitch, int row,
                                           int column, int rows, int columns) {
  using Element = typename Config::Element;
  constexpr int kLine = WarpRows<Config>::kLine;
  const int lane = threadIdx.x % 32;
  const bool exists = column + lane < columns;
#pragma unroll
  for (int i = 0; i < Config::kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Config::kFragmentsN; ++j) {
        const float low = rAcc.value(i, j, 2 * half), high = rAcc.value(i, j, 2 * half + 1);
        Element* sPair = &warp.sRows[lane / 4 * kLine + 8 * j + lane % 4 * 2];
        if constexpr (sizeof(Element) == 4) {
          *reinterpret_cast<float2*>(sPair) = make_float2(low, high);
        } else {
          *reinterpret_cast<uint32_t*>(sPair) = pack<Element>(low, high);
        }
      }
      __syncwarp();  // the rows are there for all lanes
      const int first = row + 16 * i + 8 * half;
      Element* gRow = global + first * pitch + column + lane;
#pragma unroll
      for (int line = 0; line < 8; ++line) {
        if (exists && first + line < rows) *gRow = warp.sRows[line * kLine + lane];
        gRow += pitch;
      }
      __syncwarp();  // and have been read by all, before the next ones replace them
    }
  }
}

// CTAs after those of the tiles write zeros, which each first looks for: as a rule there are none.
inline int64_t num_zero_ctas(int64_t capacity) {
  constexpr int64_t kZeroElems = 1 << 16, kMostCtas = 128;
  return std::min((capacity + kZeroElems - 1) / kZeroElems, kMostCtas);
}

// Part `part` of `parts` of the zeros in the elements that belong to no matrix.
template <int kThreads, typename Element>
__device__ __forceinline__ void zero_outside(const MatricesView& matrices, Element* global,
                                             int64_t part, int64_t parts) {
  const MatricesExtent extent = matrices_extent(matrices);
  const int64_t first = part * kThreads + threadIdx.x, step = parts * kThreads;
  for (int64_t i = first; i < extent.begin; i += step) global[i] = Element(0.0f);
  for (int64_t i = extent.end + first; i < matrices.capacity; i += step) {
    global[i] = Element(0.0f);
  }
}

}  // namespace jagged_cuda::gemm
