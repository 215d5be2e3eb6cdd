// layer_norm_mul_dropout of rows of any length and alignment, f64 too.
//
// A warp for each row, which it reads again for each sum. Backward, one kernel writes dx, du and the
// row's statistics, and another one, whose threads have a column each, adds the rows of its CTA to a
// row of `partial`. Shared memory: the sums of 8 warps for 32 columns, behind one barrier.
#pragma once

#include "cuda/kernels/norm/draws.cuh"

namespace jagged_cuda::norm {

template <typename S>
__device__ __forceinline__ S add_warp(S value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <typename Element>
__device__ __forceinline__ void statistics_of(Sum<Element>& mean, Sum<Element>& rstd,
                                              const Element* gX, int64_t columns, double eps) {
  using S = Sum<Element>;
  const int lane = threadIdx.x % 32;
  S sum = S(0), squares = S(0);
  for (int64_t column = lane; column < columns; column += 32) sum += to_sum(gX[column]);
  mean = add_warp(sum) / static_cast<S>(columns);
  for (int64_t column = lane; column < columns; column += 32) {
    const S distance = to_sum(gX[column]) - mean;
    squares += distance * distance;
  }
  rstd = S(1) / sqrt(add_warp(squares) / static_cast<S>(columns) + static_cast<S>(eps));
}

template <typename Element>
__global__ __launch_bounds__(kThreads) void forward_plain(const __grid_constant__ Params params) {
  using S = Sum<Element>;
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (row >= params.total) return;
  const Element* gX = static_cast<const Element*>(params.x) + row * params.x_stride;
  const Element* gU = static_cast<const Element*>(params.u) + row * params.u_stride;
  const S* gWeight = static_cast<const S*>(params.weight);
  const S* gBias = static_cast<const S*>(params.bias);
  Element* gOut = static_cast<Element*>(params.out) + row * params.columns;
  S mean, rstd;
  statistics_of<Element>(mean, rstd, gX, params.columns, params.eps);
  for (int64_t column = threadIdx.x % 32; column < params.columns; column += 32) {
    const S keep = keep_one<Element>(params, row, column);
    const S xhat = (to_sum(gX[column]) - mean) * rstd;
    const S normed = xhat * gWeight[column] + gBias[column];
    gOut[column] = from_sum<Element>(keep == S(0) ? S(0) : to_sum(gU[column]) * normed * keep);
  }
}

// du, dx and the statistics of a row.
template <typename Element>
__global__ __launch_bounds__(kThreads) void backward_plain(
    const __grid_constant__ BackwardParams backward) {
  using S = Sum<Element>;
  const Params& params = backward.forward;
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (row >= params.total) return;
  const int lane = threadIdx.x % 32;
  const Element* gX = static_cast<const Element*>(params.x) + row * params.x_stride;
  const Element* gU = static_cast<const Element*>(params.u) + row * params.u_stride;
  const Element* gGrad =
      static_cast<const Element*>(backward.grad_out) + row * backward.grad_stride;
  const S* gWeight = static_cast<const S*>(params.weight);
  const S* gBias = static_cast<const S*>(params.bias);
  Element* gGradU = static_cast<Element*>(backward.grad_u) + row * params.columns;
  Element* gGradX = static_cast<Element*>(backward.grad_x) + row * params.columns;
  S mean, rstd;
  statistics_of<Element>(mean, rstd, gX, params.columns, params.eps);
  S mean_h = S(0), mean_hx = S(0);
  for (int64_t column = lane; column < params.columns; column += 32) {
    const S keep = keep_one<Element>(params, row, column);
    const S xhat = (to_sum(gX[column]) - mean) * rstd;
    const S kept = keep == S(0) ? S(0) : to_sum(gGrad[column]) * keep;
    const S weight = gWeight[column];
    gGradU[column] = from_sum<Element>(kept * (xhat * weight + gBias[column]));
    const S h = kept * to_sum(gU[column]) * weight;
    mean_h += h;
    mean_hx += h * xhat;
  }
  mean_h = add_warp(mean_h) / static_cast<S>(params.columns);
  mean_hx = add_warp(mean_hx) / static_cast<S>(params.columns);
  for (int64_t column = lane; column < params.columns; column += 32) {
    const S keep = keep_one<Element>(params, row, column);
    const S xhat = (to_sum(gX[column]) - mean) * rstd;
    const S kept = keep == S(0) ? S(0) : to_sum(gGrad[column]) * keep;
    const S h = kept * to_sum(gU[column]) * gWeight[column];
    gGradX[column] = from_sum<Element>(rstd * (h - mean_h - xhat * mean_hx));
  }
  if (lane == 0) {
    S* gStatistics = static_cast<S*>(backward.statistics) + 2 * row;
    gStatistics[0] = mean;
    gStatistics[1] = rstd;
  }
}

// Sums over the rows of a CTA, a column for each lane; grid x: columns / 32, y: rows of `partial`.
template <typename Element>
__global__ __launch_bounds__(kThreads) void sum_columns_plain(
    const __grid_constant__ BackwardParams backward) {
  using S = Sum<Element>;
  __shared__ S sColumns[2][kWarps][32];
  const Params& params = backward.forward;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = blockIdx.x * int64_t{32} + lane;
  S grad_weight = S(0), grad_bias = S(0);
  if (column < params.columns) {
    const int64_t apart = gridDim.y * int64_t{kWarps};
    for (int64_t row = blockIdx.y * int64_t{kWarps} + warp; row < params.total; row += apart) {
      const S* gStatistics = static_cast<const S*>(backward.statistics) + 2 * row;
      const S keep = keep_one<Element>(params, row, column);
      const auto at = [&](const void* global, int64_t stride) {
        return to_sum(static_cast<const Element*>(global)[row * stride + column]);
      };
      const S xhat = (at(params.x, params.x_stride) - gStatistics[0]) * gStatistics[1];
      const S kept = keep == S(0) ? S(0) : at(backward.grad_out, backward.grad_stride) * keep;
      const S product = kept * at(params.u, params.u_stride);
      grad_weight += product * xhat;
      grad_bias += product;
    }
  }
  sColumns[0][warp][lane] = grad_weight;
  sColumns[1][warp][lane] = grad_bias;
  __syncthreads();  // the sums of all warps are there
  if (warp < 2 && column < params.columns) {
    S sum = sColumns[warp][0][lane];
    for (int w = 1; w < kWarps; ++w) sum += sColumns[warp][w][lane];
    static_cast<S*>(backward.partial)[(blockIdx.y * 2 + warp) * params.columns + column] = sum;
  }
}

}  // namespace jagged_cuda::norm
