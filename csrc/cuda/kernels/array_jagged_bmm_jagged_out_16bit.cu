// array_jagged_bmm_jagged_out for bf16 and fp16.
#include "cuda/kernels/array_jagged_bmm_jagged_out.cuh"

namespace jagged_cuda::gemm {

template cudaError_t launch_math<Bf16>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);
template cudaError_t launch_math<Fp16>(const ArrayJaggedBmmJaggedOutParams&, cudaStream_t);

}  // namespace jagged_cuda::gemm
