// jagged_dense_bmm for fp32, in TF32 and in TF32 split in two.
#include "cuda/kernels/jagged_dense_bmm.cuh"

namespace jagged_cuda::gemm {

template cudaError_t launch_math<Tf32>(const JaggedDenseBmmParams&, cudaStream_t);
template cudaError_t launch_math<Fp32>(const JaggedDenseBmmParams&, cudaStream_t);

}  // namespace jagged_cuda::gemm
