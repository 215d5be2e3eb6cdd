// Target attention's backward of few queries on mma.sync (attention/target_backward.cuh), bf16.
#define JAGGED_CUDA_FEW_QUERIES
#include "target_backward.cpp"
