#include "cuda/kernels/jagged_jagged_bmm_jagged_out_wgmma.cuh"

namespace jagged_cuda::gemm {

cudaError_t launch_matrices_wgmma_bf16(const JaggedJaggedBmmJaggedOutParams& params,
                                       cudaStream_t stream) {
  return launch_matrices_wgmma<__nv_bfloat16>(params, stream);
}

}  // namespace jagged_cuda::gemm
