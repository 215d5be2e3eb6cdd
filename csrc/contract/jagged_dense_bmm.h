// jagged_dense_bmm: z_b = activation(x_b y_b + bias_b), for each sequence b.
#pragma once

#include "contract/activation.h"
#include "contract/contract.h"

namespace jagged_cuda {

struct JaggedDenseBmmSizes {
  int64_t total;     // T: rows of x and of the result
  int64_t num_seqs;  // B
  int64_t inner;     // D: features that are summed over
  int64_t columns;   // N
  Activation activation;
};

// x [T, D], y [B, D, N], offsets [B + 1], bias [B, N] or none
inline JaggedDenseBmmSizes parse_jagged_dense_bmm(const Tensor& x, const Tensor& y,
                                                  const Tensor& offsets,
                                                  const std::optional<Tensor>& bias,
                                                  int64_t activation) {
  constexpr const char* op = "jagged_dense_bmm";
  check_dim(op, "x", x, 2, "[T, D]");
  check_dim(op, "y", y, 3, "[B, D, N]");
  check_floating(op, "x", x);
  check_like(op, "y", y, x);
  check_offsets(op, "offsets", offsets, x);
  const JaggedDenseBmmSizes sizes{x.size(0), offsets.size(0) - 1, x.size(1), y.size(2),
                                  static_cast<Activation>(activation)};
  check_shape(op, "y", y, {sizes.num_seqs, sizes.inner, sizes.columns});
  if (bias) {
    check_shape(op, "bias", *bias, {sizes.num_seqs, sizes.columns});
    check_like(op, "bias", *bias, x);
  }
  if (activation < 0 || activation >= kActivations) {
    fail_argument(op, "activation", "from 0 to 5", std::to_string(activation));
  }
  return sizes;
}

}  // namespace jagged_cuda
