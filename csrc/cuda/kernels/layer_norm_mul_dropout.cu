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
// norm/in_registers.cuh has the rows that lanes can hold, norm/plain.cuh all others. Backward, a
// second kernel adds the rows of `partial`, in fixed order. Deterministic.
#include "cuda/kernels/layer_norm_mul_dropout.h"

#include "cuda/kernels/norm/in_registers.cuh"
#include "cuda/kernels/norm/plain.cuh"
#include "cuda/kernels/prim/launch.cuh"

#include <algorithm>

namespace jagged_cuda {
namespace {

using namespace norm;

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
  // Of 16-bit rows a thread keeps so many columns that two of them per pass, in one CTA per SM, were
  // the fastest; docs/performance_log.md has the others.
  constexpr bool kTwoRows = kBackward && sizeof(Element) == 2;
  constexpr int kRows = kTwoRows ? 2 : 1, kCtas = kTwoRows ? 1 : 2;
  if constexpr (kTwoRows) {
    if (vectors <= 8) {
      int lanes_log2 = 0;
      while ((int64_t{1} << lanes_log2) < vectors) ++lanes_log2;
      return run(Config<Element, 1, 2, false, 2>{}, Shape{lanes_log2, kThreads});
    }
  }
  if (vectors <= 64) {
    int lanes_log2 = 0;
    while ((int64_t{2} << lanes_log2) < vectors) ++lanes_log2;
    return run(Config<Element, 2, kRows, false, kCtas>{}, Shape{lanes_log2, kThreads});
  }
  const int threads = vectors <= 128 ? 64 : vectors <= 256 ? 128 : kThreads;
  if (vectors <= 2 * threads) {
    return run(Config<Element, 2, kRows, true, kCtas>{}, Shape{5, threads});
  }
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
