#define JAGGED_LAST_KERNEL jagged_cuda_last_kernel_cpu
#include "contract/last_kernel.inl"
