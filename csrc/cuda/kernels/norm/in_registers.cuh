// layer_norm_mul_dropout of rows in registers (lanes.cuh), in f32.
//
// x is read once: the mean, then the sum of squared distances from it, are sums over the row's
// lanes. Grid: x, as many CTAs as are resident. A warp, or the CTA, takes sets of kRows rows per
// lane, one grid apart, and loads the next set before it works on one. Backward, each thread keeps
// the sums of its columns for dweight and dbias in registers; at the end each CTA adds them in fixed
// order and writes a row of `partial` [CTAs, 2, D].
//
// Shared memory: that of lanes.cuh; backward, the sums of columns of 8 warps, between two barriers:
// one publishes them, one keeps them until all have been read.
#pragma once

#include "cuda/kernels/norm/draws.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::norm {

struct ForwardLaunch {
  Params params;
  int lanes_log2;  // of a row within a warp
};

struct BackwardLaunch {
  BackwardParams params;
  int lanes_log2;
};

// weight or bias beside a vector, times kept_scale; zeros past the row.
template <int kVector>
__device__ __forceinline__ void load_columns(float (&values)[kVector], const void* global,
                                             int column, int64_t columns, float scale) {
  using Four = Vector<float, 4>;
#pragma unroll
  for (int e = 0; e < kVector; e += 4) {
    Four four{};
    if (column < columns) {
      four = *reinterpret_cast<const Four*>(static_cast<const float*>(global) + column + e);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[e + i] = four.elems[i] * scale;
  }
}

// x becomes xhat; 1 / standard deviation of each row.
template <typename Config>
__device__ __forceinline__ void normalise(Values<Config>& x, float (&rstd)[Config::kRows],
                                          const Exists<Config>& exists, const Params& params,
                                          RowSums<Config::kWide>& sums) {
  const float count = 1.0f / static_cast<float>(params.columns);
  float mean[Config::kRows];
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    mean[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
#pragma unroll
      for (int e = 0; e < Config::kVector; ++e) mean[r] += x[r][i][e];
    }
  }
  sums.add(mean);
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    mean[r] *= count;
    rstd[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      const float subtracted = exists.columns[i] ? mean[r] : 0.0f;  // zeros stay past the row
#pragma unroll
      for (int e = 0; e < Config::kVector; ++e) {
        x[r][i][e] -= subtracted;
        rstd[r] += x[r][i][e] * x[r][i][e];
      }
    }
  }
  sums.add(rstd);
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    rstd[r] = rsqrtf(rstd[r] * count + static_cast<float>(params.eps));
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
#pragma unroll
      for (int e = 0; e < Config::kVector; ++e) x[r][i][e] *= rstd[r];
    }
  }
}

template <typename Config>
__device__ __forceinline__ RowSums<Config::kWide> row_sums(int lanes) {
  if constexpr (Config::kWide) {
    __shared__ float sSums[2][kMaxSums][kWarps];
    return {sSums};
  } else {
    return {lanes};
  }
}

template <typename Config>
__global__ __launch_bounds__(kThreads, Config::kCtas) void forward_rows(
    const __grid_constant__ ForwardLaunch launch) {
  constexpr int kRows = Config::kRows, kItems = Config::kItems, kVector = Config::kVector;
  const Params& params = launch.params;
  const Place<Config> place(launch.lanes_log2);
  const int64_t unit_rows = int64_t{kRows} * place.step, pass_rows = place.units * unit_rows;
  int64_t first_row = place.unit * unit_rows + place.row;
  Cursor<Config> x(params.x, params.x_stride, place), u(params.u, params.u_stride, place),
      out(params.out, params.columns, place);
  Packed next_x[kRows][kItems], next_u[kRows][kItems];
  Exists<Config> next(place, first_row, params);
  load_rows(next_x, x, place, next);
  load_rows(next_u, u, place, next);
  const uint64_t seed = params.seed == nullptr ? 0 : static_cast<uint64_t>(*params.seed);
  const uint32_t dropped = drop_up_to(params);
  const float scale = kept_scale(params);
  auto sums = row_sums<Config>(place.lanes);
  float weight[kItems][kVector], bias[kItems][kVector];  // times kept_scale
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int column = place.column + i * place.apart;
    load_columns(weight[i], params.weight, column, params.columns, scale);
    load_columns(bias[i], params.bias, column, params.columns, scale);
  }
  // The same units for all lanes of a row.
  while (first_row - place.row < params.total) {
    const Exists<Config> exists = next;
    Values<Config> xhat, gate;
    unpack_rows<Config>(xhat, next_x);
    unpack_rows<Config>(gate, next_u);
    x.advance();
    u.advance();
    next = Exists<Config>(place, first_row + pass_rows, params);
    load_rows(next_x, x, place, next);
    load_rows(next_u, u, place, next);
    float rstd[kRows];
    normalise<Config>(xhat, rstd, exists, params, sums);
    const Draws<Config> draws(params, seed, place, first_row);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        float result[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float normed = xhat[r][i][e] * weight[i][e] + bias[i][e];
          result[e] = draws.keep(gate[r][i][e] * normed, r, i, e, dropped);
        }
        store_vector(result, out, r, i, place, exists);
      }
    }
    out.advance();
    first_row += pass_rows;
  }
}

// Adds the sums of columns over the lanes and warps that have the same ones, in fixed order, and
// writes them to this CTA's row of `partial`.
template <typename Config>
__device__ __forceinline__ void write_column_sums(float (&value)[Config::kItems][Config::kVector],
                                                  const Place<Config>& place, int64_t columns,
                                                  float* gPartial) {
  constexpr int kVector = Config::kVector;
  if constexpr (Config::kWide) {
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      const int column = place.column + i * place.apart;
      if (column >= columns) break;
#pragma unroll
      for (int e = 0; e < kVector; ++e) gPartial[column + e] = value[i][e];
    }
  } else {
    __shared__ float sColumns[kWarps][kVector][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        for (int offset = place.lanes; offset < 32; offset *= 2) {
          value[i][e] += __shfl_xor_sync(0xffffffffu, value[i][e], offset);
        }
        sColumns[warp][e][lane] = value[i][e];
      }
      __syncthreads();  // the sums of all warps are there
      for (int index = threadIdx.x; index < kVector * 32; index += kThreads) {
        // Neighbouring threads have neighbouring columns.
        const int from = index / kVector, e = index % kVector;
        const int column = from * kVector + i * place.apart + e;
        if (from < place.lanes && column < columns) {
          float sum = sColumns[0][e][from];
          for (int w = 1; w < kWarps; ++w) sum += sColumns[w][e][from];
          gPartial[column] = sum;
        }
      }
      __syncthreads();  // all have read them
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(kThreads, Config::kCtas) void backward_rows(
    const __grid_constant__ BackwardLaunch launch) {
  constexpr int kRows = Config::kRows, kItems = Config::kItems, kVector = Config::kVector;
  using Element = typename Config::Element;
  const BackwardParams& backward = launch.params;
  const Params& params = backward.forward;
  const Place<Config> place(launch.lanes_log2);
  const int64_t unit_rows = int64_t{kRows} * place.step, pass_rows = place.units * unit_rows;
  int64_t first_row = place.unit * unit_rows + place.row;
  Cursor<Config> x(params.x, params.x_stride, place), u(params.u, params.u_stride, place),
      grad(backward.grad_out, backward.grad_stride, place),
      grad_x(backward.grad_x, params.columns, place),
      grad_u(backward.grad_u, params.columns, place);
  Packed next_x[kRows][kItems], next_u[kRows][kItems], next_grad[kRows][kItems];
  Exists<Config> next(place, first_row, params);
  load_rows(next_x, x, place, next);
  load_rows(next_u, u, place, next);
  load_rows(next_grad, grad, place, next);
  const uint64_t seed = params.seed == nullptr ? 0 : static_cast<uint64_t>(*params.seed);
  const uint32_t dropped = drop_up_to(params);
  const float scale = kept_scale(params), count = 1.0f / static_cast<float>(params.columns);
  auto sums = row_sums<Config>(place.lanes);
  float weight[kItems][kVector], bias[kItems][kVector];  // times kept_scale
  float grad_weight[kItems][kVector], grad_bias[kItems][kVector];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int column = place.column + i * place.apart;
    load_columns(weight[i], params.weight, column, params.columns, scale);
    load_columns(bias[i], params.bias, column, params.columns, scale);
#pragma unroll
    for (int e = 0; e < kVector; ++e) grad_weight[i][e] = grad_bias[i][e] = 0.0f;
  }
  // The same units for all lanes of a row.
  while (first_row - place.row < params.total) {
    const Exists<Config> exists = next;
    Packed rU[kRows][kItems], rGrad[kRows][kItems];
    Values<Config> xhat, h;
    unpack_rows<Config>(xhat, next_x);
#pragma unroll
    for (int i = 0; i < kRows * kItems; ++i) {
      rU[i / kItems][i % kItems] = next_u[i / kItems][i % kItems];
      rGrad[i / kItems][i % kItems] = next_grad[i / kItems][i % kItems];
    }
    x.advance();
    u.advance();
    grad.advance();
    next = Exists<Config>(place, first_row + pass_rows, params);
    load_rows(next_x, x, place, next);
    load_rows(next_u, u, place, next);
    load_rows(next_grad, grad, place, next);
    float rstd[kRows], means[2 * kRows];  // of h and h xhat
    normalise<Config>(xhat, rstd, exists, params, sums);
    const Draws<Config> draws(params, seed, place, first_row);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      means[2 * r] = means[2 * r + 1] = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        float gate[kVector], g[kVector];
        unpack_vector<Element>(gate, rU[r][i]);
        unpack_vector<Element>(g, rGrad[r][i]);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const float kept = draws.keep(g[e], r, i, e, dropped), product = kept * gate[e];
          grad_weight[i][e] += product * xhat[r][i][e];
          grad_bias[i][e] += product;
          h[r][i][e] = product * weight[i][e];
          means[2 * r] += h[r][i][e];
          means[2 * r + 1] += h[r][i][e] * xhat[r][i][e];
          g[e] = kept * (xhat[r][i][e] * weight[i][e] + bias[i][e]);
        }
        store_vector(g, grad_u, r, i, place, exists);
      }
    }
    sums.add(means);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float mean_h = means[2 * r] * count, mean_hx = means[2 * r + 1] * count;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          h[r][i][e] = rstd[r] * (h[r][i][e] - mean_h - xhat[r][i][e] * mean_hx);
        }
        store_vector(h[r][i], grad_x, r, i, place, exists);
      }
    }
    grad_x.advance();
    grad_u.advance();
    first_row += pass_rows;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      grad_weight[i][e] *= scale;
      grad_bias[i][e] *= scale;
    }
  }
  ptx::griddepcontrol_launch_dependents();
  float* gPartial = static_cast<float*>(backward.partial) + blockIdx.x * 2 * params.columns;
  write_column_sums<Config>(grad_weight, place, params.columns, gPartial);
  write_column_sums<Config>(grad_bias, place, params.columns, gPartial + params.columns);
}

}  // namespace jagged_cuda::norm
