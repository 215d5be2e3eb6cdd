#include "cuda/kernels/array_jagged_bmm_jagged_out_wgmma.cuh"

namespace jagged_cuda::gemm {

cudaError_t launch_array_wgmma_f16(const ArrayJaggedBmmJaggedOutParams& params,
                                   cudaStream_t stream) {
  return params.transpose ? launch_array_columns<__half, true>(params, stream)
                          : launch_array_columns<__half, false>(params, stream);
}

}  // namespace jagged_cuda::gemm
