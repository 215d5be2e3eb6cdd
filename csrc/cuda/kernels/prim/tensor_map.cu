#include "cuda/kernels/prim/tensor_map.h"

namespace jagged_cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up at run time: the libraries do not link to the driver, so that
// they load where there is none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kSince, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Encode>(function)
             : nullptr;
}

}  // namespace

cudaError_t encode_tensor_map(CUtensorMap& map, const TensorMapSource& source, int box_rows,
                              int box_columns) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr int64_t kElementBytes = 2;
  const auto stride_bytes = [&](int64_t stride, int64_t extent) {
    return static_cast<cuuint64_t>((extent > 1 ? stride : source.dim) * kElementBytes);
  };
  const auto at_least_one = [](int64_t extent) {
    return static_cast<cuuint64_t>(extent > 0 ? extent : 1);
  };
  const cuuint64_t extents[3] = {at_least_one(source.dim), at_least_one(source.heads),
                                 at_least_one(source.rows)};
  const cuuint64_t strides[2] = {stride_bytes(source.head_stride, source.heads),
                                 stride_bytes(source.row_stride, source.rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), 1,
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const auto run = [&] {
    return encode(
        &map, source.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3, const_cast<void*>(source.data), extents, strides, box, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        box_columns * kElementBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = run();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has called nothing of the runtime yet, such as that of a backward pass, has no
    // context, and the driver makes none.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    result = run();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jagged_cuda
