// layer_norm_mul_dropout, for each row of x and u [T, D], in f32 (f64 of f64):
//
//   xhat = (x - mean) rstd      rstd = 1 / sqrt(variance + eps)
//   out  = keep u (xhat weight + bias)      keep: 0, or 1 / (1 - p) (contract/dropout.h)
//
// and its gradients, with g = keep grad_out, h = g u weight, and means over the row:
//
//   du = g (xhat weight + bias)     dx = rstd (h - mean(h) - xhat mean(h xhat))
//   dweight = sum over rows of g u xhat     dbias = sum over rows of g u
//
// Rows in registers. Lanes hold vectors of 16 bytes. A row of up to 64 vectors belongs to lanes of
// one warp (the warp holds as many rows as it has lanes for), one of up to kMaxVectors to the CTA.
// x is read once: the mean, then the sum of squared distances from it, are sums over the row's
// lanes by shuffles, and over the CTA's warps through shared memory. kRows rows at a time, so that
// loads and shuffles of one row do not wait for those of another. Forward: grid x, a CTA for each
// set of rows. Backward: as many CTAs as are resident, each of which takes sets one grid apart and
// keeps its sums for dweight and dbias in registers; then each CTA writes a row of `partial`
// [CTAs, 2, D], and a second kernel adds them.
//
// Other rows (longer, not aligned, or f64): a warp for each row, which it reads again for each sum;
// backward, a kernel writes dx, du and the row's statistics, and another one, whose threads have a
// column each, adds the rows of its CTA to a row of `partial`.
//
// Shared memory: the sums of a row over warps, twice (one is written while slower warps read the
// other), and the sums of columns over warps. Rows past the end are not read and count as zeros. All
// sums are in a fixed order: deterministic.
#include "cuda/kernels/layer_norm_mul_dropout.h"

#include "contract/dropout_words.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <algorithm>

namespace jagged_cuda {
namespace {

using Params = LayerNormMulDropoutParams;
using BackwardParams = LayerNormMulDropoutBackwardParams;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxVectors = 4 * kThreads;

// How a thread holds its part of a row: kItems vectors, of kRows rows at a time; kWide: the row
// belongs to the CTA. kCtas: resident per SM, that the registers must leave room for.
template <typename Element_, int kItems_, int kRows_, bool kWide_, int kCtas_>
struct Config {
  using Element = Element_;
  static constexpr int kItems = kItems_, kRows = kRows_, kCtas = kCtas_;
  static constexpr bool kWide = kWide_;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
};

// A vector of 16 bytes as it lies in memory. In words: 16-bit elements would take a register each.
struct alignas(16) Packed {
  uint32_t words[4];
};

template <typename Element, int kVector>
__device__ __forceinline__ void unpack_vector(float (&values)[kVector], const Packed& packed) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Element, __half>) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(packed.words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      values[2 * i] = __uint_as_float(packed.words[i] << 16);
      values[2 * i + 1] = __uint_as_float(packed.words[i] & 0xffff0000u);
    } else {
      values[i] = __uint_as_float(packed.words[i]);
    }
  }
}

template <typename Element, int kVector>
__device__ __forceinline__ Packed round_vector(const float (&values)[kVector]) {
  Packed packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 2) {
      packed.words[i] = pack<Element>(values[2 * i], values[2 * i + 1]);
    } else {
      packed.words[i] = __float_as_uint(values[i]);
    }
  }
  return packed;
}

struct ForwardLaunch {
  Params params;
  int lanes_log2;  // of a row within a warp
};

struct BackwardLaunch {
  BackwardParams params;
  int lanes_log2;
};

// Where a thread's elements are.
template <typename Config>
struct Place {
  int64_t unit;   // of kRows * step rows
  int64_t units;  // of the grid
  int step;       // rows beside each other
  int row;        // among these
  int column;     // of the first vector
  int apart;      // columns from one vector to the next
  int lanes;      // of a row within a warp

  __device__ __forceinline__ explicit Place(int lanes_log2) {
    if constexpr (Config::kWide) {
      unit = blockIdx.x;
      units = gridDim.x;
      step = 1;
      row = 0;
      column = static_cast<int>(threadIdx.x) * Config::kVector;
      apart = static_cast<int>(blockDim.x) * Config::kVector;
      lanes = 32;
    } else {
      const int lane = threadIdx.x % 32;
      unit = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
      units = gridDim.x * int64_t{kWarps};
      lanes = 1 << lanes_log2;
      step = 32 >> lanes_log2;
      row = lane >> lanes_log2;
      column = (lane & (lanes - 1)) * Config::kVector;
      apart = lanes * Config::kVector;
    }
  }
};

// Sums over the lanes of a row, and over the warps of a wide one. Every thread gets them.
template <bool kWide>
struct RowSums;

template <>
struct RowSums<false> {
  int lanes;
  template <int kCount>
  __device__ __forceinline__ void add(float (&value)[kCount]) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
    }
  }
};

constexpr int kMaxSums = 8;  // at a time

template <>
struct RowSums<true> {
  float (*sSums)[kMaxSums][kWarps];  // [2]
  int turn = 0;
  template <int kCount>
  __device__ __forceinline__ void add(float (&value)[kCount]) {
    static_assert(kCount <= kMaxSums);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sSums[turn][i][warp] = value[i];
    }
    // The sums of all warps are there. The next ones go to the other buffer, which every warp that
    // has come here has read.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i] = sSums[turn][i][0];
      for (int w = 1; w < warps; ++w) value[i] += sSums[turn][i][w];
    }
    turn ^= 1;
  }
};

// A thread's elements in a [T, D] tensor, of one unit of rows after another.
template <typename Config>
struct Cursor {
  using Element = typename Config::Element;
  Element* first;    // of the first row and vector
  int64_t per_row;   // elements from one row of the thread to the next
  int64_t per_unit;  // to the next unit of the thread

  __device__ __forceinline__ Cursor(const void* global, int64_t stride, const Place<Config>& place)
      : per_row(place.step * stride), per_unit(place.units * Config::kRows * per_row) {
    const int64_t row = place.unit * Config::kRows * place.step + place.row;
    first = static_cast<Element*>(const_cast<void*>(global)) + row * stride + place.column;
  }
  __device__ __forceinline__ void advance() { first += per_unit; }
};

// Which of a thread's rows and vectors are there.
template <typename Config>
struct Exists {
  int rows;  // from the thread's first one to the end
  bool columns[Config::kItems];

  __device__ __forceinline__ Exists(const Place<Config>& place, int64_t first_row,
                                    const Params& params) {
    const int64_t left = params.total - first_row;
    rows = left < 0x7fffffff ? static_cast<int>(left) : 0x7fffffff;
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      columns[i] = place.column + i * place.apart < params.columns;
    }
  }
};

template <typename Config>
__device__ __forceinline__ void load_rows(Packed (&rows)[Config::kRows][Config::kItems],
                                          const Cursor<Config>& cursor, const Place<Config>& place,
                                          const Exists<Config>& exists) {
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      rows[r][i] = Packed{};
      if (r * place.step < exists.rows && exists.columns[i]) {
        rows[r][i] =
            *reinterpret_cast<const Packed*>(cursor.first + r * cursor.per_row + i * place.apart);
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void store_vector(const float (&values)[Config::kVector],
                                             const Cursor<Config>& cursor, int r, int i,
                                             const Place<Config>& place,
                                             const Exists<Config>& exists) {
  using Element = typename Config::Element;
  if (r * place.step >= exists.rows || !exists.columns[i]) return;
  *reinterpret_cast<Packed*>(cursor.first + r * cursor.per_row + i * place.apart) =
      round_vector<Element>(values);
}

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

// Which elements of a thread's vectors are dropped (contract/dropout.h).
template <typename Config>
struct Draws {
  static constexpr int kVector = Config::kVector, kCount = Config::kRows * Config::kItems;
  static_assert(kDropoutColumns % kVector == 0);
  uint32_t words[kCount][kDropoutWords];

  __device__ __forceinline__ Draws(const Params& params, uint64_t seed, const Place<Config>& place,
                                   int64_t first_row) {
    if (params.seed == nullptr) {
#pragma unroll
      for (int i = 0; i < kCount * kDropoutWords; ++i) {
        words[i / kDropoutWords][i % kDropoutWords] = 0xffffffffu;
      }
      return;
    }
    DropoutPlace places[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = place.column + i % Config::kItems * place.apart;
      places[i] = {first_row + i / Config::kItems * place.step, column / kDropoutColumns};
    }
    dropout_words(words, seed, places);
    if constexpr (kVector < kDropoutColumns) {
      // A vector of 4 takes the first or the second half of its counter's words.
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = place.column + i % Config::kItems * place.apart;
        const bool second = column % kDropoutColumns != 0;
        words[i][0] = second ? words[i][2] : words[i][0];
        words[i][1] = second ? words[i][3] : words[i][1];
      }
    }
  }
  __device__ __forceinline__ float keep(float value, int r, int i, int e,
                                        uint32_t drop_up_to) const {
    const uint32_t half = dropout_half(words[r * Config::kItems + i][e / 2], e);
    return half <= drop_up_to ? 0.0f : value;
  }
};

// What a draw is compared with: without a seed every half is larger.
__device__ __forceinline__ uint32_t drop_up_to(const Params& params) {
  return params.seed == nullptr ? 0 : params.drop_up_to;
}

__device__ __forceinline__ float kept_scale(const Params& params) {
  return params.seed == nullptr ? 1.0f : static_cast<float>(params.kept_scale);
}

template <typename Config>
using Values = float[Config::kRows][Config::kItems][Config::kVector];

template <typename Config>
__device__ __forceinline__ void unpack_rows(Values<Config>& values,
                                            const Packed (&rows)[Config::kRows][Config::kItems]) {
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      unpack_vector<typename Config::Element>(values[r][i], rows[r][i]);
    }
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

// --- rows of any length and place

template <typename S>
__device__ __forceinline__ S add_warp(S value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <typename Element>
__device__ __forceinline__ Sum<Element> keep_one(const Params& params, int64_t row,
                                                 int64_t column) {
  using S = Sum<Element>;
  if (params.seed == nullptr) return S(1);
  uint32_t words[1][kDropoutWords];
  dropout_words(words, static_cast<uint64_t>(*params.seed), {{row, column / kDropoutColumns}});
  const int place = static_cast<int>(column % kDropoutColumns);
  const uint32_t low = place < 2 ? words[0][0] : words[0][1];
  const uint32_t high = place < 6 ? words[0][2] : words[0][3];
  const uint32_t half = dropout_half(place < 4 ? low : high, place);
  return half <= params.drop_up_to ? S(0) : static_cast<S>(params.kept_scale);
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

// --- the rows of `partial`

constexpr int kPartialThreads = 512;
constexpr int kPartialWarps = kPartialThreads / 32;
constexpr int kPartialItems = 8;  // that a thread has in flight

// Grid x: 2 D / 32 sets of columns; a column of dweight or dbias for each lane, whose rows the
// warps share.
template <typename S>
__global__ __launch_bounds__(kPartialThreads) void sum_partial(
    const __grid_constant__ BackwardParams backward) {
  __shared__ S sColumns[kPartialWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t columns = backward.forward.columns, rows = backward.workspace.num_partials;
  const int64_t column = blockIdx.x * int64_t{32} + lane;
  const bool exists = column < 2 * columns;
  const S* gPartial = static_cast<const S*>(backward.partial) + column;
  S sum = S(0);
  ptx::griddepcontrol_wait();  // `partial` is there
  for (int64_t row = warp; exists && row < rows; row += kPartialItems * kPartialWarps) {
    S rPartial[kPartialItems];
#pragma unroll
    for (int i = 0; i < kPartialItems; ++i) {
      const int64_t next = row + i * kPartialWarps;
      rPartial[i] = next < rows ? gPartial[next * 2 * columns] : S(0);
    }
#pragma unroll
    for (int i = 0; i < kPartialItems; ++i) sum += rPartial[i];
  }
  sColumns[warp][lane] = sum;
  __syncthreads();  // the sums of all warps are there
  if (warp != 0 || !exists) return;
  for (int w = 1; w < kPartialWarps; ++w) sum += sColumns[w][lane];
  void* gResult = column < columns ? backward.grad_weight : backward.grad_bias;
  static_cast<S*>(gResult)[column < columns ? column : column - columns] = sum;
}

// --- the host

// How a row lies in a warp or a CTA.
struct Shape {
  int lanes_log2;
  int threads;
};

int64_t vectors_of(const Params& params) {
  const int64_t elems = is_16_bit(params.type) ? 8 : 4;
  return (params.columns + elems - 1) / elems;
}

bool in_registers(const Params& params) {
  return params.type != ElementType::kF64 && params.vectors && vectors_of(params) <= kMaxVectors;
}

// run(config, shape) with the Config of a row's length.
template <typename Element, bool kBackward, typename Run>
cudaError_t with_config(int64_t vectors, Run run) {
  // Measured on 103,366 rows of 64 to 1,024 elements; docs/performance_log.md has the others.
  constexpr bool kTwoRows = kBackward && sizeof(Element) == 2;
  constexpr int kRows = kTwoRows ? 2 : 1, kCtas = kTwoRows ? 1 : 2;
  if (vectors <= 64) {
    int lanes_log2 = 0;
    while ((int64_t{2} << lanes_log2) < vectors) ++lanes_log2;
    return run(Config<Element, 2, kRows, false, kCtas>{}, Shape{lanes_log2, kThreads});
  }
  constexpr int kItems = kTwoRows ? 1 : 2;
  const int threads = vectors <= 64 * kItems ? 64 : vectors <= 128 * kItems ? 128 : kThreads;
  if (vectors <= threads * kItems) {
    return run(Config<Element, kItems, kRows, true, 2>{}, Shape{5, threads});
  }
  if (vectors <= kThreads * 2) return run(Config<Element, 2, 1, true, 1>{}, Shape{5, kThreads});
  return run(Config<Element, 4, 1, true, 1>{}, Shape{5, kThreads});
}

// with_element and with_config for rows that are kept in registers.
template <bool kBackward, typename Run>
cudaError_t with_config(const Params& params, Run run) {
  const int64_t vectors = vectors_of(params);
  switch (params.type) {
    case ElementType::kBf16:
      return with_config<__nv_bfloat16, kBackward>(vectors, run);
    case ElementType::kF16:
      return with_config<__half, kBackward>(vectors, run);
    case ElementType::kF32:
      return with_config<float, kBackward>(vectors, run);
    default:
      return cudaErrorInvalidValue;
  }
}

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// As many CTAs as there are units of rows, or as are resident.
template <typename Config>
cudaError_t count_ctas(const Shape& shape, int64_t total, int64_t& ctas) {
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t units = Config::kWide ? 1 : int64_t{kWarps} * (32 >> shape.lanes_log2);
  const int64_t resident = int64_t{num_sms} * Config::kCtas * (kThreads / shape.threads);
  ctas = std::min(divide_up(total, Config::kRows * units), resident);
  return error;
}

}  // namespace

cudaError_t launch_layer_norm_mul_dropout(const Params& params, cudaStream_t stream) {
  if (!in_registers(params)) {
    return with_element(params.type, [&](auto element) {
      return launch<forward_plain<decltype(element)>>(params, {divide_up(params.total, kWarps)},
                                                      kThreads, 0, stream,
                                                      "cuda.layer_norm_mul_dropout.plain");
    });
  }
  return with_config<false>(params, [&](auto config, const Shape& shape) {
    using Config = decltype(config);
    int64_t ctas = 0;
    const cudaError_t error = count_ctas<Config>(shape, params.total, ctas);
    if (error != cudaSuccess) return error;
    constexpr const char* kPath =
        Config::kWide ? "cuda.layer_norm_mul_dropout.cta" : "cuda.layer_norm_mul_dropout.warp";
    return launch<forward_rows<Config>>(ForwardLaunch{params, shape.lanes_log2}, {ctas},
                                        shape.threads, 0, stream, kPath);
  });
}

cudaError_t layer_norm_workspace(const Params& params, LayerNormWorkspace& workspace) {
  workspace.needs_statistics = !in_registers(params);
  if (workspace.needs_statistics) {
    constexpr int64_t kMaxPartials = 512;
    workspace.num_partials = std::min(divide_up(params.total, 8 * kWarps), kMaxPartials);
    return cudaSuccess;
  }
  return with_config<true>(params, [&](auto config, const Shape& shape) {
    return count_ctas<decltype(config)>(shape, params.total, workspace.num_partials);
  });
}

cudaError_t launch_layer_norm_mul_dropout_backward(const BackwardParams& params,
                                                   cudaStream_t stream) {
  const Params& forward = params.forward;
  const int64_t ctas = params.workspace.num_partials;
  cudaError_t error = cudaSuccess;
  if (ctas == 0) {
    // Without rows the sums are zeros.
  } else if (params.workspace.needs_statistics) {
    error = with_element(forward.type, [&](auto element) {
      using Element = decltype(element);
      const cudaError_t first =
          launch<backward_plain<Element>>(params, {divide_up(forward.total, kWarps)}, kThreads, 0,
                                          stream, "cuda.layer_norm_mul_dropout_backward.plain");
      if (first != cudaSuccess) return first;
      return launch<sum_columns_plain<Element>>(params, {divide_up(forward.columns, 32), ctas},
                                                kThreads, 0, stream, nullptr);
    });
  } else {
    error = with_config<true>(forward, [&](auto config, const Shape& shape) {
      using Config = decltype(config);
      constexpr const char* kPath = Config::kWide ? "cuda.layer_norm_mul_dropout_backward.cta"
                                                  : "cuda.layer_norm_mul_dropout_backward.warp";
      return launch<backward_rows<Config>>(BackwardLaunch{params, shape.lanes_log2}, {ctas},
                                           shape.threads, 0, stream, kPath);
    });
  }
  if (error != cudaSuccess) return error;
  const Grid grid{divide_up(2 * forward.columns, 32)};
  if (forward.type == ElementType::kF64) {
    return launch_dependent<sum_partial<double>>(params, grid, kPartialThreads, 0, stream);
  }
  return launch_dependent<sum_partial<float>>(params, grid, kPartialThreads, 0, stream);
}

}  // namespace jagged_cuda
