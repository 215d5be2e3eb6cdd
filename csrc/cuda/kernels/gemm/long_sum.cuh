// Sums of a warpgroup's products, added up rounded to nearest, as RoundedSum
// (attention/wgmma_tile.cuh), where that happens often: 16 bytes at once.
#pragma once

#include "cuda/kernels/prim/wgmma.cuh"

namespace jagged_cuda::gemm {

template <int kBlocks>
class LongSum {
 public:
  // Takes `sum`, which starts from zero again.
  __device__ __forceinline__ void add(float (&sum)[kBlocks][4]) {
    finish(sum);
    float4* first = total_ + ptx::opaque(0);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      first[i] = {sum[i][0], sum[i][1], sum[i][2], sum[i][3]};
      sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
    }
    exists_ = true;
  }
  // Adds to the last sum what was taken.
  __device__ __forceinline__ void finish(float (&sum)[kBlocks][4]) const {
    if (!exists_) return;
    const float4* first = total_ + ptx::opaque(0);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float4 taken = first[i];
      sum[i][0] += taken.x, sum[i][1] += taken.y, sum[i][2] += taken.z, sum[i][3] += taken.w;
    }
  }

 private:
  float4 total_[kBlocks];  // in local memory, by an index that the compiler does not know
  bool exists_ = false;
};

}  // namespace jagged_cuda::gemm
