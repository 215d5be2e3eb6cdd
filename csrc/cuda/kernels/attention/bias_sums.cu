// Sums of the gradients of biases, in a fixed order: over the warps that have tables of their own, and
// over the query heads that share a column of a bias.
//
// Grid: x = blocks of kResults results, which neighbouring threads have. Where parts are many, kSlices
// threads share a result: each adds every kSlices-th part, and the first adds up theirs.
#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda::attention {

constexpr int kResults = 32, kSlices = 16, kThreads = kResults * kSlices;

__host__ __device__ inline bool is_many(const BiasSumsParams& params) {
  return params.parts > kSlices;
}

template <typename T>
__global__ void bias_sums(const __grid_constant__ BiasSumsParams params) {
  __shared__ T shared[kSlices][kResults];
  const int own = threadIdx.x % kResults;
  const bool many = is_many(params);
  const int slice = many ? threadIdx.x / kResults : 0, slices = many ? kSlices : 1;
  const int64_t at =
      many ? blockIdx.x * int64_t{kResults} + own : blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool there = at < params.outer * params.heads * params.inner;
  T sum = 0;
  if (there) {
    const int64_t inner = at % params.inner, head = at / params.inner % params.heads,
                  outer = at / params.inner / params.heads;
    const int group = params.query_heads / params.heads;
    const T* sums = static_cast<const T*>(params.sums);
    const int64_t part_elems = params.outer * params.query_heads * params.inner;
    const T* g = sums + (outer * params.query_heads + head * group) * params.inner + inner;
    for (int each = 0; each < group; ++each, g += params.inner) {
#pragma unroll 8
      for (int64_t part = slice; part < params.parts; part += slices) sum += g[part * part_elems];
    }
  }
  if (slices > 1) {
    shared[slice][own] = sum;
    __syncthreads();
    for (int other = 1; slice == 0 && other < slices; ++other) sum += shared[other][own];
  }
  if (there && slice == 0) static_cast<T*>(params.out)[at] = sum;
}

cudaError_t launch_bias_sums(const BiasSumsParams& params, cudaStream_t stream) {
  const int64_t results = params.outer * params.heads * params.inner;
  if (results == 0) return cudaSuccess;
  const int of_cta = is_many(params) ? kResults : kThreads;
  const Grid grid{(results + of_cta - 1) / of_cta};
  return params.type == ElementType::kF64
             ? launch<bias_sums<double>>(params, grid, kThreads, 0, stream, nullptr)
             : launch<bias_sums<float>>(params, grid, kThreads, 0, stream, nullptr);
}

}  // namespace jagged_cuda::attention
