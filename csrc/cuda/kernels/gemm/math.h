// In which arithmetic a product runs; free of CUDA headers, so that glue can choose.
#pragma once

namespace jagged_cuda::gemm {

enum class Math {
  kBf16,  // bf16 operands, fp32 sums
  kFp16,  // fp16 operands, fp32 sums
  kTf32,  // fp32 operands rounded to TF32, fp32 sums
  kFp32,  // fp32 operands split into two TF32 parts: as accurate as fp32
  kFp64,  // plain FMA
};

}  // namespace jagged_cuda::gemm
