// One word behind delta, [Tq * H]: whether any sequence is longer than the kernel for short ones takes.
// That kernel leaves it to those behind it, which else would look for work in vain.
#pragma once

#include "cuda/kernels/attention/route.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::attention {

__device__ __forceinline__ float* any_longer_word(const AttentionBackwardParams& params) {
  return static_cast<float*>(params.delta) + params.q_offsets.total * params.heads;
}

// Whether a kernel behind that for short sequences has nothing to do; waits for that kernel.
__device__ __forceinline__ bool none_longer(const AttentionBackwardParams& params) {
  if (!params.short_apart) return false;
  ptx::griddepcontrol_wait();
  return __ldcg(any_longer_word(params)) == 0.0f;
}

}  // namespace jagged_cuda::attention
