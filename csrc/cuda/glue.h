// What every CUDA entry needs beside its contract: stream, offsets, checks, launch errors.
#pragma once

#include "contract/contract.h"
#include "contract/last_kernel.h"

#include "cuda/checks.h"
#include "cuda/kernels/prim/jagged.cuh"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <cstring>
#include <string>

// Exported by libtorch_cuda; torch declares it under USE_CUDA only.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace jagged_cuda {

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0) {
    fail("jagged_cuda: no current stream on " + device_text(tensor));
  }
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    fail(std::string(op) + ": the CUDA library was not built for this GPU (" +
         cudaGetErrorString(error) +
         "); run `python -m jagged_cuda.info` to see what it holds, and rebuild with "
         "TORCH_CUDA_ARCH_LIST set");
  }
  fail(std::string(op) + ": CUDA error: " + cudaGetErrorString(error));
}

// JAGGED_CUDA_TENSOR_CORES=mma_sync makes every GPU take the kernels that run on all of them.
inline bool mma_sync_only(const char* op) {
  const char* choice = std::getenv("JAGGED_CUDA_TENSOR_CORES");
  if (choice == nullptr || *choice == '\0') return false;
  if (std::strcmp(choice, "mma_sync") != 0) {
    fail_argument(op, "the environment's JAGGED_CUDA_TENSOR_CORES", "mma_sync or nothing", choice);
  }
  return true;
}

// Contiguous offsets as kernels take them; `offsets` must outlive the launch.
inline OffsetsView view_offsets(const Tensor& offsets, int64_t total) {
  return {offsets.const_data_ptr(), offsets.size(0) - 1, total,
          offsets.scalar_type() == ScalarType::Long};
}

}  // namespace jagged_cuda
