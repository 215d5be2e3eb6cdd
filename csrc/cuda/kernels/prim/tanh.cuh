// tanh.approx (compute capability 7.5 and later).
#pragma once

namespace jagged_cuda::ptx {

// With a relative error of at most 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jagged_cuda::ptx
