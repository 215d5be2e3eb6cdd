// The jagged products in f64, for gradient checks: C = A B for one tile, in plain FMA.
//
// 256 threads own 16 x 16 elements of C, one each, and walk K in steps of 16 through shared memory
// (2 x 16 x 17 doubles, 4,352 bytes; 17 keeps columns free of bank conflicts). Any strides. Outside
// the extents are zeros, so that nothing there is read. The two barriers per step publish the
// tiles, and keep the next loads from them until all have used them.
#pragma once

#include <cstdint>

namespace jagged_cuda::gemm {

constexpr int kTileF64 = 16;
constexpr int kThreadsF64 = kTileF64 * kTileF64;

// Element (line, elem) is data[line * line_stride + elem * elem_stride].
struct OperandF64 {
  const double* data;
  int64_t line_stride;
  int64_t elem_stride;
};

// The calling thread's element of A [rows, depth] times B [depth, columns]: row threadIdx.x / 16,
// column threadIdx.x % 16. All threads of the CTA call it together.
__device__ __forceinline__ double multiply_f64(const OperandF64& a, const OperandF64& b,
                                               int64_t rows, int64_t columns, int64_t depth) {
  __shared__ double sA[kTileF64][kTileF64 + 1];  // [row, k]
  __shared__ double sB[kTileF64][kTileF64 + 1];  // [k, column]
  const int line = threadIdx.x / kTileF64, elem = threadIdx.x % kTileF64;
  double sum = 0.0;
  for (int64_t k = 0; k < depth; k += kTileF64) {
    sA[line][elem] = line < rows && k + elem < depth
                         ? a.data[line * a.line_stride + (k + elem) * a.elem_stride]
                         : 0.0;
    sB[line][elem] = k + line < depth && elem < columns
                         ? b.data[(k + line) * b.line_stride + elem * b.elem_stride]
                         : 0.0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTileF64; ++i) sum = fma(sA[line][i], sB[i][elem], sum);
    __syncthreads();
  }
  return sum;
}

}  // namespace jagged_cuda::gemm
