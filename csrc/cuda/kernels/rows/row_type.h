// The dtypes whose values kernels of rows read, integers included; free of CUDA headers, so that
// glue can choose.
#pragma once

namespace jagged_cuda {

enum class RowType { kBf16, kF16, kF32, kF64, kI8, kU8, kI16, kI32, kI64, kBool };

}  // namespace jagged_cuda
