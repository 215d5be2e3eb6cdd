// array_jagged_bmm_jagged_out for fp32, in TF32 and in TF32 split in two.
#include "cuda/kernels/array_jagged_bmm_jagged_out.cuh"

namespace jagged_cuda::gemm {

template cudaError_t launch_math<Tf32>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
template cudaError_t launch_math<Fp32>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);

}  // namespace jagged_cuda::gemm
