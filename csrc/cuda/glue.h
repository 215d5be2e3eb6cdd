// What every CUDA entry needs beside its contract: stream, offsets, checks, launch errors, element
// types, alignment.
#pragma once

#include "contract/contract.h"

#include "cuda/checks.h"
#include "cuda/kernels/jagged_flash_attention.h"
#include "cuda/kernels/prim/counts.cuh"
#include "cuda/kernels/prim/element.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

// Exported by libtorch_cuda; torch declares it under USE_CUDA only.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace jagged_cuda {

cudaStream_t current_stream(const Tensor& tensor);

void check_cuda(const char* op, cudaError_t error);

// Products that allow it round f32 to TF32.
inline ElementType element_type(ScalarType dtype, bool allow_tf32 = false) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return ElementType::kBf16;
    case ScalarType::Half:
      return ElementType::kF16;
    case ScalarType::Double:
      return ElementType::kF64;
    default:
      return allow_tf32 ? ElementType::kTf32 : ElementType::kF32;
  }
}

constexpr int64_t kVectorBytes = 16;

// Whether each line of `tensor` begins at a multiple of `bytes` and has a multiple of them. `dims`
// lead from one line to another; the others make up a line, and are contiguous.
bool has_aligned_lines(const Tensor& tensor, std::initializer_list<int64_t> dims,
                       int64_t bytes = kVectorBytes);

// The widest unit, up to 16 bytes, in which the lines of `tensor` can be copied. Results are
// contiguous and aligned.
int copy_unit_bytes(const Tensor& tensor, std::initializer_list<int64_t> dims);

// JAGGED_CUDA_TENSOR_CORES=mma_sync makes every GPU take the kernels that run on all of them.
bool mma_sync_only(const char* op);

// Contiguous offsets as kernels take them; `offsets` must outlive the launch.
inline OffsetsView view_offsets(const Tensor& offsets, int64_t total) {
  return {offsets.const_data_ptr(), offsets.size(0) - 1, total,
          offsets.scalar_type() == ScalarType::Long};
}

// Counts [B] contiguous, and checked where checks are on.
std::optional<Tensor> checked_counts(const char* op, const char* argument,
                                     const std::optional<Tensor>& counts);

// Contiguous counts [B] as kernels take them, or `same` for every sequence.
inline CountsView view_counts(const std::optional<Tensor>& counts, int64_t same) {
  return {counts ? counts->const_data_ptr() : nullptr, same,
          counts && counts->scalar_type() == ScalarType::Long};
}

// A [rows, heads, dim] tensor with a contiguous last dimension. Strides of dimensions of size 1 are
// arbitrary in torch, and are replaced by 0, so that they do not spoil alignment.
inline HeadsView view_heads(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.size(0) > 1 ? tensor.stride(0) : 0,
          tensor.size(1) > 1 ? tensor.stride(1) : 0};
}

}  // namespace jagged_cuda
