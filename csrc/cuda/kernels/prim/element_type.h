// The element types of operators; free of CUDA headers, so that glue can choose.
#pragma once

namespace jagged_cuda {

enum class ElementType { kFp32, kFp64, kFp16, kBf16 };

}  // namespace jagged_cuda
