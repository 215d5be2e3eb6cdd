// jagged_dense_bmm for bf16 and fp16.
#include "cuda/kernels/jagged_dense_bmm.cuh"

namespace jagged_cuda::gemm {

template cudaError_t launch_math<Bf16>(const JaggedDenseBmmParams&, cudaStream_t);
template cudaError_t launch_math<Fp16>(const JaggedDenseBmmParams&, cudaStream_t);

}  // namespace jagged_cuda::gemm
