// The products of jagged_dense_bmm and jagged_jagged_bmm on the CPU, which are each other's gradients.
#pragma once

#include "cpu/sequences.h"

#include <optional>
#include <vector>

namespace jagged_cuda::cpu {

// z_b = activation(x_b y_b + bias_b): x [T, D], y [B, D, N], or [B, N, D] if `transposed`, bias [B, N] or
// none -> [T, N]
Tensor times_dense(const char* op, Tensor x, Tensor y, bool transposed,
                   const std::vector<Sequence>& sequences,
                   std::optional<Tensor> bias = std::nullopt, int64_t activation = 0);

// z_b = x_b^T y_b: x [T, D], y [T, N] -> [B, D, N]
Tensor times_jagged(const char* op, Tensor x, Tensor y, const std::vector<Sequence>& sequences);

}  // namespace jagged_cuda::cpu
