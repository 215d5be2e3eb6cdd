#include "cuda/kernels/array_jagged_bmm_jagged_out_wgmma.cuh"

namespace jagged_cuda::gemm {

cudaError_t launch_array_wgmma_bf16(const ArrayJaggedBmmJaggedOutParams& params,
                                    cudaStream_t stream) {
  return params.transpose ? launch_array_columns<__nv_bfloat16, true>(params, stream)
                          : launch_array_columns<__nv_bfloat16, false>(params, stream);
}

}  // namespace jagged_cuda::gemm
