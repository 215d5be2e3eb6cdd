#include "cuda/kernels/prim/hopper.h"

#include <atomic>

namespace jagged_cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

__global__ void probe() {}

// The driver's function, looked up at run time: the libraries do not link to the driver, so that
// they load where there is none. Only a lookup that succeeds is remembered.
Encode find_encode() {
  static std::atomic<Encode> known{nullptr};
  if (const Encode encode = known.load(std::memory_order_relaxed)) return encode;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kSince, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // else the launch that follows would report it
    return nullptr;
  }
  known.store(reinterpret_cast<Encode>(function), std::memory_order_relaxed);
  return reinterpret_cast<Encode>(function);
}

}  // namespace

bool has_wgmma() {
  static std::atomic<uint64_t> known{0}, present{0};  // one bit per device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  const uint64_t bit = uint64_t{1} << device;
  if ((known.load(std::memory_order_acquire) & bit) == 0) {
    int major = 0;
    cudaFuncAttributes attributes{};
    constexpr int kHopper = 9;
    // What could not be asked now is asked again at the next call.
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        (major == kHopper && cudaFuncGetAttributes(&attributes, probe) != cudaSuccess)) {
      cudaGetLastError();  // else the launch that follows would report it
      return false;
    }
    if (attributes.binaryVersion == kHopper * 10) present.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
  }
  return (present.load(std::memory_order_relaxed) & bit) != 0;
}

namespace {

CUtensorMapDataType tensor_map_type(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ElementType::kTf32:
      return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    case ElementType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  }
}

}  // namespace

cudaError_t encode_tensor_map(CUtensorMap& map, const TensorMapSource& source, int box_rows,
                              int box_columns, int box_heads) {
  const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const int64_t element_bytes = is_16_bit(source.type) ? 2 : 4;
  const auto stride_bytes = [&](int64_t stride, int64_t extent) {
    return static_cast<cuuint64_t>((extent > 1 ? stride : source.dim) * element_bytes);
  };
  const auto at_least_one = [](int64_t extent) {
    return static_cast<cuuint64_t>(extent > 0 ? extent : 1);
  };
  const cuuint64_t extents[3] = {at_least_one(source.dim), at_least_one(source.heads),
                                 at_least_one(source.rows)};
  const cuuint64_t strides[2] = {stride_bytes(source.head_stride, source.heads),
                                 stride_bytes(source.row_stride, source.rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const auto run = [&] {
    return encode(
        &map, tensor_map_type(source.type), 3, const_cast<void*>(source.data), extents, strides,
        box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box_columns * element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
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
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace jagged_cuda
