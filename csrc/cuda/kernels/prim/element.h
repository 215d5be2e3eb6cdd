// The element types of operators; free of CUDA headers, so that glue can choose.
#pragma once

namespace jagged_cuda {

// kTf32 is f32 in memory, which a product rounds to TF32.
enum class ElementType { kBf16, kF16, kTf32, kF32, kF64 };

inline bool is_16_bit(ElementType type) {
  return type == ElementType::kBf16 || type == ElementType::kF16;
}

}  // namespace jagged_cuda
