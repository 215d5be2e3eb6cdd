// What the attention operators share on their way to a kernel.
#pragma once

#include "contract/contract.h"

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda {

// A [rows, heads, dim] tensor with a contiguous last dimension. Strides of dimensions of size 1 are
// arbitrary in torch, and are replaced by 0, so that they do not spoil alignment.
inline HeadsView view_heads(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.size(0) > 1 ? tensor.stride(0) : 0,
          tensor.size(1) > 1 ? tensor.stride(1) : 0};
}

}  // namespace jagged_cuda
