#include "cuda/glue.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace jagged_cuda {

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0) {
    fail("jagged_cuda: no current stream on " + device_text(tensor));
  }
  return static_cast<cudaStream_t>(stream);
}

void check_cuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    fail(std::string(op) + ": the CUDA library was not built for this GPU (" +
         cudaGetErrorString(error) +
         "); run `python -m jagged_cuda.info` to see what it holds, and rebuild with "
         "TORCH_CUDA_ARCH_LIST set");
  }
  if (error == cudaErrorInvalidConfiguration) {
    fail(std::string(op) + ": the tensors are too large for one launch on CUDA");
  }
  fail(std::string(op) + ": CUDA error: " + cudaGetErrorString(error));
}

bool has_aligned_lines(const Tensor& tensor, std::initializer_list<int64_t> dims, int64_t bytes) {
  const int64_t element_bytes = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
  int64_t line_bytes = element_bytes;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      line_bytes *= tensor.size(dim);
    } else if (tensor.size(dim) > 1) {
      aligned = aligned && tensor.stride(dim) * element_bytes % bytes == 0;
    }
  }
  return aligned && line_bytes % bytes == 0;
}

int copy_unit_bytes(const Tensor& tensor, std::initializer_list<int64_t> dims) {
  int unit = kVectorBytes;
  while (unit > static_cast<int>(tensor.element_size()) && !has_aligned_lines(tensor, dims, unit)) {
    unit /= 2;
  }
  return unit;
}

bool mma_sync_only(const char* op) {
  const char* choice = std::getenv("JAGGED_CUDA_TENSOR_CORES");
  if (choice == nullptr || *choice == '\0') return false;
  if (std::strcmp(choice, "mma_sync") != 0) {
    fail_argument(op, "the environment's JAGGED_CUDA_TENSOR_CORES", "mma_sync or nothing", choice);
  }
  return true;
}

std::optional<Tensor> checked_counts(const char* op, const char* argument,
                                     const std::optional<Tensor>& counts) {
  if (!counts) return counts;
  const Tensor dense = as_contiguous(op, *counts);
  maybe_validate_counts(op, argument, dense);
  return dense;
}

}  // namespace jagged_cuda
