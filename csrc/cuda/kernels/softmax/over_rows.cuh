// jagged2_softmax over the rows of each column (softmax/lines.cuh: the mathematics).
//
// Grid: x, a CTA for each virtual tile of kRowTile elements of the vector (prim/jagged.cuh, of
// which a matrix is a segment). A matrix is cut into strips of 32 columns, which the CTAs of its
// tiles share out in turn: so that their number follows from the size of the vector alone, and no
// strip waits for another unless there are few rows. Lanes are beside each other along a row, so
// that loads are coalesced; warps take the rows in turn:
//   - up to kItems rows for each warp: kept in registers: one pass
//   - more: read twice, with a running maximum and sum the first time
// What is added in which order depends on the number of rows alone.
//
// Shared memory: maxima and sums of each warp for 32 columns (2 x 8 x 32 x 4 bytes forward, 16 x 32
// x 4 backward, twice as much of f64). Barriers: one between writing and reading each of them. A
// buffer is written again for the next strip: the maxima after the barrier of the sums, by which
// all have read them, and the sums after the next barrier of the maxima. Backward reduces one
// sum; a second barrier protects it until every warp has read it.
//
// Elements outside every matrix, and those of one that does not fit, become zeros; columns that a
// strip lacks are not read. As in torch, a NaN or +inf makes its column NaN, and so does a column
// of -inf.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/softmax/lines.cuh"

namespace jagged_cuda::softmax {

constexpr int kRowTile = 4096;
constexpr int kStrip = 32;  // columns

// Up to 256 rows of f32 are kept, in 32 registers of each thread.
template <typename Params>
struct RowsConfig {
  static constexpr int kWarps = Operands<Params>::kBackward ? 16 : 8;
  static constexpr int kItems = 256 / kWarps;
  static constexpr int kThreads = 32 * kWarps;
};

// CTAs per SM that the registers must leave room for.
template <typename Params, typename Element>
constexpr int rows_ctas() {
  return (sizeof(Element) == 8 ? 512 : 1024) / RowsConfig<Params>::kThreads;
}

// Items that are skipped together where a matrix has fewer rows.
constexpr int kItemGroup = 4;

// Calls visit(i, row) for each row of a warp that exists: warp, warp + kWarps, ...
template <int kWarps, int kItems, typename Visit>
__device__ __forceinline__ void for_each_row(int warp, int rows, Visit visit) {
#pragma unroll
  for (int group = 0; group < kItems; group += kItemGroup) {
    if (warp + group * kWarps < rows) {
#pragma unroll
      for (int i = group; i < group + kItemGroup; ++i) {
        const int row = warp + i * kWarps;
        if (row < rows) visit(i, row);
      }
    }
  }
}

template <typename S, int kWarps>
struct RowsShared {
  S maximum[kWarps][kStrip];
  S sum[kWarps][kStrip];
};

template <typename S, int kWarps>
__device__ __forceinline__ S largest_of_warps(S (&sMaximum)[kWarps][kStrip], S own, int warp,
                                              int lane) {
  sMaximum[warp][lane] = own;
  __syncthreads();  // the maxima of all warps are there
#pragma unroll
  for (int w = 0; w < kWarps; ++w) own = largest(own, sMaximum[w][lane]);
  return own;
}

template <typename S, int kWarps>
__device__ __forceinline__ S sum_of_warps(S (&sSum)[kWarps][kStrip], S own, int warp, int lane) {
  sSum[warp][lane] = own;
  __syncthreads();  // the sums of all warps are there
  own = S(0);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) own += sSum[w][lane];
  return own;
}

// One column of `rows` rows, `pitch` elements apart: rows warp, warp + kWarps, ... are this
// thread's. A thread without a column has 0 rows.
template <typename Element, int kWarps, int kItems>
__device__ __forceinline__ void softmax_short_column(const Element* gX, Element* gOut, int rows,
                                                     int64_t pitch, int warp, int lane,
                                                     Sum<Element> scale,
                                                     RowsShared<Sum<Element>, kWarps>& shared) {
  using S = Sum<Element>;
  S rX[kItems];
  S maximum = minus_infinity<S>(), sum = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) rX[i] = S(0);
  for_each_row<kWarps, kItems>(warp, rows,
                               [&](int i, int row) { rX[i] = to_sum(gX[row * pitch]); });
  for_each_row<kWarps, kItems>(warp, rows,
                               [&](int i, int) { maximum = largest(maximum, scale * rX[i]); });
  maximum = largest_of_warps(shared.maximum, maximum, warp, lane);
  for_each_row<kWarps, kItems>(warp, rows, [&](int i, int) {
    rX[i] = exponential(fma(rX[i], scale, -maximum));
    sum += rX[i];
  });
  const S inverse = S(1) / sum_of_warps(shared.sum, sum, warp, lane);
  for_each_row<kWarps, kItems>(
      warp, rows, [&](int i, int row) { gOut[row * pitch] = from_sum<Element>(rX[i] * inverse); });
}

template <typename Element, int kWarps>
__device__ __forceinline__ void softmax_long_column(const Element* gX, Element* gOut, int64_t rows,
                                                    int64_t pitch, int warp, int lane,
                                                    Sum<Element> scale,
                                                    RowsShared<Sum<Element>, kWarps>& shared) {
  using S = Sum<Element>;
  constexpr int kItems = 8, kStep = kItems * kWarps;
  Statistics<S> own;
#pragma unroll 1
  for (int64_t first = warp; first < rows; first += kStep) {
    const int left = static_cast<int>(rows - first < kStep ? rows - first : kStep);
    S rX[kItems];
    S greatest = own.maximum;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rX[i] = S(0);
      if (i * kWarps < left) rX[i] = to_sum(gX[(first + i * kWarps) * pitch]);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kWarps < left) greatest = largest(greatest, scale * rX[i]);
    }
    const S shift = finite(greatest);
    own.sum *= exponential(own.maximum - shift);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kWarps < left) own.sum += exponential(fma(rX[i], scale, -shift));
    }
    own.maximum = greatest;
  }
  const S maximum = largest_of_warps(shared.maximum, own.maximum, warp, lane);
  const S sum = own.sum * exponential(own.maximum - finite(maximum));
  const S inverse = S(1) / sum_of_warps(shared.sum, sum, warp, lane);
#pragma unroll 4
  for (int64_t row = warp; row < rows; row += kWarps) {
    const S x = to_sum(gX[row * pitch]);
    gOut[row * pitch] = from_sum<Element>(exponential(fma(x, scale, -maximum)) * inverse);
  }
}

template <typename Element, int kWarps, int kItems>
__device__ __forceinline__ void softmax_short_column_backward(
    const Element* gP, const Element* gGrad, Element* gOut, int rows, int64_t pitch, int warp,
    int lane, Sum<Element> scale, RowsShared<Sum<Element>, kWarps>& shared) {
  using S = Sum<Element>;
  S rP[kItems], rGrad[kItems];
  S sum = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) rP[i] = rGrad[i] = S(0);
  for_each_row<kWarps, kItems>(warp, rows, [&](int i, int row) {
    rP[i] = to_sum(gP[row * pitch]);
    rGrad[i] = to_sum(gGrad[row * pitch]);
  });
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum = fma(rP[i], rGrad[i], sum);
  sum = sum_of_warps(shared.sum, sum, warp, lane);
  for_each_row<kWarps, kItems>(warp, rows, [&](int i, int row) {
    gOut[row * pitch] = from_sum<Element>(scale * rP[i] * (rGrad[i] - sum));
  });
  __syncthreads();  // all have read the sums, which the next strip writes
}

template <typename Element, int kWarps>
__device__ __forceinline__ void softmax_long_column_backward(
    const Element* gP, const Element* gGrad, Element* gOut, int64_t rows, int64_t pitch, int warp,
    int lane, Sum<Element> scale, RowsShared<Sum<Element>, kWarps>& shared) {
  using S = Sum<Element>;
  S sum = S(0);
#pragma unroll 2
  for (int64_t row = warp; row < rows; row += kWarps) {
    sum = fma(to_sum(gP[row * pitch]), to_sum(gGrad[row * pitch]), sum);
  }
  sum = sum_of_warps(shared.sum, sum, warp, lane);
#pragma unroll 2
  for (int64_t row = warp; row < rows; row += kWarps) {
    const S p = to_sum(gP[row * pitch]), grad = to_sum(gGrad[row * pitch]);
    gOut[row * pitch] = from_sum<Element>(scale * p * (grad - sum));
  }
  __syncthreads();  // all have read the sums, which the next strip writes
}

template <typename Params, typename Element>
__global__ __launch_bounds__(
    RowsConfig<Params>::kThreads,
    rows_ctas<Params, Element>()) void over_rows_kernel(const __grid_constant__ Params params) {
  using Operand = Operands<Params>;
  using Config = RowsConfig<Params>;
  constexpr int kWarps = Config::kWarps, kItems = Config::kItems;
  __shared__ RowsShared<Sum<Element>, kWarps> shared;
  const JaggedTile tile = find_any_tile<kRowTile>(elements_of(params.matrices), blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  Element* gOut = static_cast<Element*>(Operand::result(params));
  const Matrix matrix = tile.seq < 0 ? Matrix{} : find_matrix(params.matrices, tile.seq);
  if (!matrix.fits) {
    const int64_t left = tile.rows.len - tile.row;
    store_zeros(gOut + tile.rows.begin + tile.row, left < kRowTile ? left : kRowTile, threadIdx.x,
                Config::kThreads);
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len;
  if (rows == 0) return;  // with wrong offsets alone, and then of any number of columns
  const int64_t strips = (columns + kStrip - 1) / kStrip;
  const int64_t tiles = (tile.rows.len + kRowTile - 1) / kRowTile;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  const auto scale = static_cast<Sum<Element>>(params.scale);
#pragma unroll 1
  for (int64_t strip = tile.row / kRowTile; strip < strips; strip += tiles) {
    const int64_t column = strip * kStrip + lane;
    const int64_t start = matrix.begin + column;
    const int64_t own_rows = column < columns ? rows : 0;
    if constexpr (Operand::kBackward) {
      if (rows <= kWarps * kItems) {
        softmax_short_column_backward<Element, kWarps, kItems>(
            gX + start, gGrad + start, gOut + start, static_cast<int>(own_rows), columns, warp,
            lane, scale, shared);
      } else {
        softmax_long_column_backward(gX + start, gGrad + start, gOut + start, own_rows, columns,
                                     warp, lane, scale, shared);
      }
    } else {
      if (rows <= kWarps * kItems) {
        softmax_short_column<Element, kWarps, kItems>(gX + start, gOut + start,
                                                      static_cast<int>(own_rows), columns, warp,
                                                      lane, scale, shared);
      } else {
        softmax_long_column(gX + start, gOut + start, own_rows, columns, warp, lane, scale, shared);
      }
    }
  }
}

template <typename Element, typename Params>
cudaError_t launch_over_rows(const Params& params, cudaStream_t stream) {
  const int64_t tiles =
      num_tiles(params.matrices.capacity, params.matrices.rows.num_seqs, kRowTile);
  return launch<over_rows_kernel<Params, Element>>(
      params, {tiles}, RowsConfig<Params>::kThreads, 0, stream,
      Operands<Params>::kBackward ? "cuda.jagged2_softmax_backward.rows"
                                  : "cuda.jagged2_softmax.rows");
}

}  // namespace jagged_cuda::softmax
