// Sums of the gradients of biases, in a fixed order: over the warps that have tables of their own, and
// over the query heads that share a column of a bias.
//
// Grid: x = blocks of results; one thread each, which adds its terms one after another. Neighbouring
// threads read neighbouring numbers.
#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda::attention {

template <typename T>
__global__ void bias_sums(const __grid_constant__ BiasSumsParams params) {
  const int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (at >= params.outer * params.heads * params.inner) return;
  const int64_t inner = at % params.inner, head = at / params.inner % params.heads,
                outer = at / params.inner / params.heads;
  const int group = params.query_heads / params.heads;
  const T* sums = static_cast<const T*>(params.sums);
  T sum = 0;
  for (int64_t part = 0; part < params.parts; ++part) {
    const int64_t line = (part * params.outer + outer) * params.query_heads + head * group;
#pragma unroll 4
    for (int each = 0; each < group; ++each) sum += sums[(line + each) * params.inner + inner];
  }
  static_cast<T*>(params.out)[at] = sum;
}

cudaError_t launch_bias_sums(const BiasSumsParams& params, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const int64_t results = params.outer * params.heads * params.inner;
  if (results == 0) return cudaSuccess;
  const Grid grid{(results + kThreads - 1) / kThreads};
  return params.type == ElementType::kF64
             ? launch<bias_sums<double>>(params, grid, kThreads, 0, stream, nullptr)
             : launch<bias_sums<float>>(params, grid, kThreads, 0, stream, nullptr);
}

}  // namespace jagged_cuda::attention
