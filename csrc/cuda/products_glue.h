// The products of jagged_dense_bmm and jagged_jagged_bmm on CUDA, which are each other's gradients: fill
// Params, launch. `bounds` is contiguous.
#pragma once

#include "cuda/glue.h"
#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/jagged_jagged_bmm.h"

#include <optional>

namespace jagged_cuda {

// y [B, D, N], or [B, N, D] if it is transposed, as the kernel takes it: stride 1 along D or N. A
// dimension of size 1 has any stride, so both may serve; then the one whose lines are aligned.
struct DenseOperand {
  Tensor y;
  bool along_inner;
  bool vectors;
};

inline bool has_unit_stride(const Tensor& y, int64_t dimension) {
  return y.stride(dimension) == 1 || y.size(dimension) <= 1;
}

inline DenseOperand prepare_dense(const char* op, const Tensor& y, int64_t inner, int64_t columns) {
  const bool along_columns = has_unit_stride(y, columns), along_inner = has_unit_stride(y, inner);
  const bool columns_aligned = along_columns && has_aligned_lines(y, {0, inner});
  const bool inner_aligned = along_inner && has_aligned_lines(y, {0, columns});
  if (columns_aligned) return {y, false, true};
  if (inner_aligned) return {y, true, true};
  if (along_columns) return {y, false, false};
  if (along_inner) return {y, true, false};
  const Tensor copy = contiguous_copy(op, y);
  return {copy, columns == 1, has_aligned_lines(copy, {0, 1})};
}

// y [B, D, N] as prepare_dense takes it without a copy, which then serves two products that overlap:
// what one of them reads must live until both have been launched.
inline Tensor shared_dense(const char* op, const Tensor& y) {
  return has_unit_stride(y, 1) || has_unit_stride(y, 2) ? y : contiguous_copy(op, y);
}

// z_b = activation(x_b y_b + bias_b): x [T, D], y [B, D, N], or [B, N, D] if `transposed`, bias [B, N] or
// none -> [T, N]. If it `overlaps`, a kernel of the same operator comes before it,
// and no operand of either may need a copy.
inline Tensor times_dense(const char* op, const Tensor& x, const Tensor& y, bool transposed,
                          const Tensor& bounds, bool allow_tf32, cudaStream_t stream,
                          const std::optional<Tensor>& bias = std::nullopt,
                          Activation activation = Activation{}, bool overlaps = false) {
  const int64_t inner = transposed ? 2 : 1, columns = 3 - inner;
  const Tensor out = allocate(op, x, {x.size(0), y.size(columns)});
  if (out.numel() == 0) return out;
  const Tensor rows = as_contiguous(op, x, -1);
  const DenseOperand dense = prepare_dense(op, y, inner, columns);
  const std::optional<Tensor> bias_rows =
      bias ? std::optional<Tensor>(as_contiguous(op, *bias, -1)) : std::nullopt;

  JaggedDenseBmmParams params;
  params.x = rows.const_data_ptr();
  params.y = dense.y.const_data_ptr();
  params.bias = bias_rows ? bias_rows->const_data_ptr() : nullptr;
  params.bias_stride = bias_rows ? bias_rows->stride(0) : 0;
  params.activation = activation;
  params.out = out.mutable_data_ptr();
  params.offsets = view_offsets(bounds, x.size(0));
  params.inner = y.size(inner);
  params.columns = y.size(columns);
  params.x_stride = rows.stride(0);
  params.y_seq_stride = dense.y.stride(0);
  params.y_stride = dense.y.stride(dense.along_inner ? columns : inner);
  params.y_along_inner = dense.along_inner;
  params.x_vectors = has_aligned_lines(rows, {0});
  params.y_vectors = dense.vectors;
  params.mma_sync_only = mma_sync_only(op);
  params.overlaps = overlaps;
  params.type = element_type(x.scalar_type(), allow_tf32);
  check_cuda(op, launch_jagged_dense_bmm(params, stream));
  return out;
}

// z_b = x_b^T y_b: x [T, D], y [T, N] -> [B, D, N]. `partial` is memory that the product uses; if a
// kernel behind it overlaps, it must live until that has been launched.
inline Tensor times_jagged(const char* op, const Tensor& x, const Tensor& y, const Tensor& bounds,
                           bool allow_tf32, cudaStream_t stream, std::optional<Tensor>& partial) {
  const OffsetsView offsets = view_offsets(bounds, x.size(0));
  const Tensor out = allocate(op, x, {offsets.num_seqs, x.size(1), y.size(1)});
  if (out.numel() == 0) return out;
  const Tensor left = as_contiguous(op, x, -1), right = as_contiguous(op, y, -1);

  JaggedJaggedBmmParams params;
  params.x = left.const_data_ptr();
  params.y = right.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.offsets = offsets;
  params.rows = x.size(1);
  params.columns = y.size(1);
  params.x_stride = left.stride(0);
  params.y_stride = right.stride(0);
  params.x_vectors = has_aligned_lines(left, {0});
  params.y_vectors = has_aligned_lines(right, {0});
  params.mma_sync_only = mma_sync_only(op);
  params.type = element_type(x.scalar_type(), allow_tf32);
  if (const int64_t sums = num_partial_sums(params); sums > 0) {
    partial = allocate(op, x, {sums}, ScalarType::Float);
  }
  params.partial = partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr;
  check_cuda(op, launch_jagged_jagged_bmm(params, stream));
  return out;
}

}  // namespace jagged_cuda
