#define JAGGED_LAST_KERNEL jagged_cuda_last_kernel_cuda
#include "contract/last_kernel.inl"
