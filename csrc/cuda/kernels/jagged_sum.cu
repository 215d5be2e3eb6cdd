// jagged_sum and jagged_mean: choice of the element type (rows/sum.cuh: mapping, shared memory,
// barriers).
#include "cuda/kernels/rows/sum.cuh"

namespace jagged_cuda {

cudaError_t launch_jagged_sum(const JaggedSumParams& params, cudaStream_t stream) {
  switch (params.type) {
    case ElementType::kFp32:
      return rows::launch_sum_type<float>(params, stream);
    case ElementType::kFp64:
      return rows::launch_sum_type<double>(params, stream);
    case ElementType::kFp16:
      return rows::launch_sum_type<__half>(params, stream);
    case ElementType::kBf16:
      return rows::launch_sum_type<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jagged_cuda
