// What the attention operators share on their way to a kernel: element types and views.
#pragma once

#include "contract/contract.h"

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda {

inline AttentionElement attention_element(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return AttentionElement::kFloat16;
    case ScalarType::BFloat16:
      return AttentionElement::kBFloat16;
    case ScalarType::Float:
      return AttentionElement::kFloat32;
    default:
      return AttentionElement::kFloat64;
  }
}

// A [rows, heads, dim] tensor with a contiguous last dimension. Strides of dimensions of size 1 are
// arbitrary in torch, and are replaced by 0, so that they do not spoil alignment.
inline HeadsView view_heads(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.size(0) > 1 ? tensor.stride(0) : 0,
          tensor.size(1) > 1 ? tensor.stride(1) : 0};
}

constexpr int64_t kVectorBytes = 16;

// Whether `data` and everything that lies whole strides from it start at vectors.
inline bool on_vectors(const void* data, int64_t element_bytes,
                       std::initializer_list<int64_t> strides) {
  bool all = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
  for (int64_t elems : strides) all = all && elems * element_bytes % kVectorBytes == 0;
  return all;
}

inline bool aligned(const HeadsView& view, int64_t dim, int64_t element_bytes) {
  return on_vectors(view.data, element_bytes, {view.row_stride, view.head_stride, dim});
}

}  // namespace jagged_cuda
