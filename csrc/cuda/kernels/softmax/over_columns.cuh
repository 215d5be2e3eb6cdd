// jagged2_softmax over the columns of each row (softmax/lines.cuh: the mathematics).
//
// Grid: x, a warp for each virtual tile of kColumnTile elements of the vector (prim/jagged.cuh, of
// which a matrix is a segment): so many rows begin in it, whatever their length. The warp takes the
// rows that begin in its tile:
//   - up to 32 columns: several rows at once, each by a power of two of lanes
//   - up to 32 kColumnItems: kRowsAtOnce rows at once, kept in registers: one pass
//   - longer: one row at a time, read twice, with a running maximum and sum the first time
// Lanes are beside each other along a row, so that loads are coalesced wherever a row begins.
// What is added in which order depends on the row's length alone.
//
// No shared memory, no barriers. Elements outside every matrix, and those of one that does not fit,
// become zeros. As in torch, a NaN or +inf makes its row NaN, and so does a row of -inf.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

constexpr int kColumnThreads = 128;
constexpr int kColumnWarps = kColumnThreads / 32;
constexpr int kColumnTile = 1024;
constexpr int kColumnItems = 8;
constexpr int kRowsAtOnce = 2;  // forward; backward one, of which there are two operands
// CTAs per SM, as registers allow
template <typename Params, typename Element>
constexpr int kColumnCtas = sizeof(Element) == 8 ? 5 : 10;

template <typename Params>
struct ColumnsLaunch {
  Params params;
  int64_t tiles;
};

template <typename S, typename Combine>
__device__ __forceinline__ S combine_lanes(S value, int lanes, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < lanes) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

template <typename S>
__device__ __forceinline__ S largest_of_lanes(S value, int lanes) {
  return combine_lanes(value, lanes, [](S a, S b) { return largest(a, b); });
}

template <typename S>
__device__ __forceinline__ S sum_of_lanes(S value, int lanes) {
  return combine_lanes(value, lanes, [](S a, S b) { return a + b; });
}

// kRows rows, of which this lane holds elements lane, lane + 32, ...: row r begins at element
// r * step. `len` is 0 for a row that does not exist. With fewer than 32 lanes there is but one
// item.
template <typename Element, int kRows, int kItems>
__device__ __forceinline__ void softmax_short_rows(const Element* gX, Element* gOut, int step,
                                                   const int (&len)[kRows], int lane, int lanes,
                                                   Sum<Element> scale) {
  using S = Sum<Element>;
  S rX[kRows][kItems], maximum[kRows], sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rX[r][i] = S(0);
      if (lane + 32 * i < len[r]) rX[r][i] = to_sum(gX[r * step + lane + 32 * i]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = minus_infinity<S>();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (lane + 32 * i < len[r]) maximum[r] = largest(maximum[r], scale * rX[r][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) maximum[r] = largest_of_lanes(maximum[r], lanes);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sum[r] = S(0);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (lane + 32 * i < len[r]) {
        rX[r][i] = exponential(fma(rX[r][i], scale, -maximum[r]));
        sum[r] += rX[r][i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = S(1) / sum_of_lanes(sum[r], lanes);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (lane + 32 * i < len[r]) {
        gOut[r * step + lane + 32 * i] = from_sum<Element>(rX[r][i] * sum[r]);
      }
    }
  }
}

// The gradient of one row.
template <typename Element, int kItems>
__device__ __forceinline__ void softmax_short_row_backward(const Element* gP, const Element* gGrad,
                                                           Element* gOut, int len, int lane,
                                                           int lanes, Sum<Element> scale) {
  using S = Sum<Element>;
  S rP[kItems], rGrad[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    rP[i] = rGrad[i] = S(0);
    if (lane + 32 * i < len) {
      rP[i] = to_sum(gP[lane + 32 * i]);
      rGrad[i] = to_sum(gGrad[lane + 32 * i]);
    }
  }
  S sum = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum = fma(rP[i], rGrad[i], sum);
  sum = sum_of_lanes(sum, lanes);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (lane + 32 * i < len) {
      gOut[lane + 32 * i] = from_sum<Element>(scale * rP[i] * (rGrad[i] - sum));
    }
  }
}

template <typename Element>
__device__ __forceinline__ void softmax_long_row(const Element* gX, Element* gOut, int64_t len,
                                                 int lane, Sum<Element> scale) {
  using S = Sum<Element>;
  constexpr int kStep = 32 * kColumnItems;
  Statistics<S> own;
#pragma unroll 1
  for (int64_t first = lane; first < len; first += kStep) {
    const int left = static_cast<int>(len - first < kStep ? len - first : kStep);
    S rX[kColumnItems];
    S greatest = own.maximum;
#pragma unroll
    for (int i = 0; i < kColumnItems; ++i) {
      rX[i] = S(0);
      if (32 * i < left) rX[i] = to_sum(gX[first + 32 * i]);
    }
#pragma unroll
    for (int i = 0; i < kColumnItems; ++i) {
      if (32 * i < left) greatest = largest(greatest, scale * rX[i]);
    }
    const S shift = finite(greatest);
    own.sum *= exponential(own.maximum - shift);
#pragma unroll
    for (int i = 0; i < kColumnItems; ++i) {
      if (32 * i < left) own.sum += exponential(fma(rX[i], scale, -shift));
    }
    own.maximum = greatest;
  }
  const S maximum = largest_of_lanes(own.maximum, 32);
  const S inverse = S(1) / sum_of_lanes(own.sum * exponential(own.maximum - finite(maximum)), 32);
#pragma unroll 4
  for (int64_t i = lane; i < len; i += 32) {
    gOut[i] = from_sum<Element>(exponential(fma(to_sum(gX[i]), scale, -maximum)) * inverse);
  }
}

template <typename Element>
__device__ __forceinline__ void softmax_long_row_backward(const Element* gP, const Element* gGrad,
                                                          Element* gOut, int64_t len, int lane,
                                                          Sum<Element> scale) {
  using S = Sum<Element>;
  S sum = S(0);
#pragma unroll 4
  for (int64_t i = lane; i < len; i += 32) sum = fma(to_sum(gP[i]), to_sum(gGrad[i]), sum);
  sum = sum_of_lanes(sum, 32);
#pragma unroll 4
  for (int64_t i = lane; i < len; i += 32) {
    gOut[i] = from_sum<Element>(scale * to_sum(gP[i]) * (to_sum(gGrad[i]) - sum));
  }
}

// All rows of a warp's tile, one after another from the pointers on; `lanes` share a row.
template <typename Params, typename Element, int kItems>
__device__ __forceinline__ void softmax_short(const Element* gX, const Element* gGrad,
                                              Element* gOut, int rows, int columns, int lanes,
                                              Sum<Element> scale) {
  constexpr bool kBackward = Operands<Params>::kBackward;
  constexpr int kRows = kBackward ? 1 : kRowsAtOnce;
  const int lane = threadIdx.x % 32;
  const int abreast = 32 / lanes, own_row = lane / lanes, own_lane = lane % lanes;
#pragma unroll 1
  for (int row = 0; row < rows; row += abreast * kRows) {
    int len[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      len[r] = row + r * abreast + own_row < rows ? columns : 0;
    }
    // Rows that begin in a tile of kColumnTile elements begin less than that away from its first.
    const int start = (row + own_row) * columns;
    if constexpr (kBackward) {
      softmax_short_row_backward<Element, kItems>(gX + start, gGrad + start, gOut + start, len[0],
                                                  own_lane, lanes, scale);
    } else {
      softmax_short_rows<Element, kRows, kItems>(gX + start, gOut + start, abreast * columns, len,
                                                 own_lane, lanes, scale);
    }
  }
}

template <typename Params, typename Element>
__global__ __launch_bounds__(kColumnThreads, kColumnCtas<Params, Element>) void over_columns_kernel(
    const __grid_constant__ ColumnsLaunch<Params> launch) {
  using Operand = Operands<Params>;
  const Params& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kColumnWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kColumnTile>(elements_of(params.matrices), index);
  if (tile.row >= tile.rows.len) return;
  const int lane = threadIdx.x % 32;
  Element* gOut = static_cast<Element*>(Operand::result(params));
  const Matrix matrix = tile.seq < 0 ? Matrix{} : find_matrix(params.matrices, tile.seq);
  if (!matrix.fits) {
    const int64_t left = tile.rows.len - tile.row;
    store_zeros(gOut + tile.rows.begin + tile.row, left < kColumnTile ? left : kColumnTile, lane,
                32);
    return;
  }
  const int64_t columns = matrix.columns.len;
  if (columns == 0) return;  // with wrong offsets alone
  const int64_t first_row = (tile.row + columns - 1) / columns;
  int64_t end_row = (tile.row + kColumnTile + columns - 1) / columns;
  if (end_row > matrix.rows.len) end_row = matrix.rows.len;
  const int rows = first_row < end_row ? static_cast<int>(end_row - first_row) : 0;
  const int64_t begin = matrix.begin + first_row * columns;
  const Element* gX = static_cast<const Element*>(Operand::x(params)) + begin;
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params)) + begin;
  const auto scale = static_cast<Sum<Element>>(params.scale);
  gOut += begin;

  if (columns > 32 * kColumnItems) {
    for (int row = 0; row < rows; ++row) {
      const int64_t start = row * columns;
      if constexpr (Operand::kBackward) {
        softmax_long_row_backward(gX + start, gGrad + start, gOut + start, columns, lane, scale);
      } else {
        softmax_long_row(gX + start, gOut + start, columns, lane, scale);
      }
    }
    return;
  }
  if (columns > 32) {
    softmax_short<Params, Element, kColumnItems>(gX, gGrad, gOut, rows, static_cast<int>(columns),
                                                 32, scale);
  } else {
    int lanes = 32;
    while (lanes / 2 >= columns) lanes /= 2;
    softmax_short<Params, Element, 1>(gX, gGrad, gOut, rows, static_cast<int>(columns), lanes,
                                      scale);
  }
}

template <typename Element, typename Params>
cudaError_t launch_over_columns(const Params& params, cudaStream_t stream) {
  const int64_t tiles =
      num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs, kColumnTile);
  return launch<over_columns_kernel<Params, Element>>(
      ColumnsLaunch<Params>{params, tiles}, {(tiles + kColumnWarps - 1) / kColumnWarps},
      kColumnThreads, 0, stream,
      Operands<Params>::kBackward ? "cuda.jagged2_softmax_backward.columns"
                                  : "cuda.jagged2_softmax.columns");
}

}  // namespace jagged_cuda::softmax
