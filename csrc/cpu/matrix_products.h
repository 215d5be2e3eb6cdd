// The products with one matrix per sequence on the CPU, which are each other's gradients.
#pragma once

#include "cpu/matrices.h"

#include <vector>

namespace jagged_cuda::cpu {

// z_b = x_b y_b^T: x [Tx, D], y [Ty, D] -> [total_out], in which `matrices` lie; zeros elsewhere
Tensor times_rows(const char* op, Tensor x, Tensor y, const Tensor& matrix_offsets,
                  const std::vector<Matrix>& matrices, int64_t total_out);

// z_b = A_b y_b, or A_b^T y_b if `transpose`: a, in which `matrices` lie, y [T, N] -> [total, N]
Tensor times_matrices(const char* op, Tensor a, Tensor y, const std::vector<Matrix>& matrices,
                      int64_t total, bool transpose);

}  // namespace jagged_cuda::cpu
