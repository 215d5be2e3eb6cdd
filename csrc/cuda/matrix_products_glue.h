// The products of jagged_jagged_bmm_jagged_out and array_jagged_bmm_jagged_out on CUDA, which are each
// other's gradients: fill Params, launch. One that `overlaps` may start before the one launched before it
// has ended, which must be one of this operator; operands of either that are copied must then live until
// both have been launched.
#pragma once

#include "cuda/matrices.h"
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"

namespace jagged_cuda {

// z_b = x_b y_b^T: x [Tx, D], y [Ty, D] -> [total_out]
inline Tensor times_rows(const char* op, const Tensor& x, const Tensor& y,
                         const MatrixOffsets& bounds, int64_t total_out, bool allow_tf32,
                         cudaStream_t stream, bool overlaps = false) {
  const Tensor out = allocate(op, x, {total_out});
  if (total_out == 0) return out;
  const Tensor left = as_contiguous(op, x, -1), right = as_contiguous(op, y, -1);

  JaggedJaggedBmmJaggedOutParams params;
  params.x = left.const_data_ptr();
  params.y = right.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.matrices = view_matrices(bounds, x.size(0), y.size(0), total_out);
  params.inner = x.size(1);
  params.x_stride = left.stride(0);
  params.y_stride = right.stride(0);
  params.x_vectors = has_aligned_lines(left, {0});
  params.y_vectors = has_aligned_lines(right, {0});
  params.mma_sync_only = mma_sync_only(op);
  params.overlaps = overlaps;
  params.type = element_type(x.scalar_type(), allow_tf32);
  check_cuda(op, launch_jagged_jagged_bmm_jagged_out(params, stream));
  return out;
}

// z_b = A_b y_b: a [sum Lx*Ly], y [Ty, N] -> [total, N]; if `transpose` A_b^T y_b, y [Tx, N]
inline Tensor times_matrices(const char* op, const Tensor& a, const Tensor& y,
                             const MatrixOffsets& bounds, int64_t total, bool transpose,
                             bool allow_tf32, cudaStream_t stream, bool overlaps = false) {
  const Tensor out = allocate(op, a, {total, y.size(1)});
  if (out.numel() == 0) return out;
  const Tensor elements = as_contiguous(op, a), rows = as_contiguous(op, y, -1);
  const int64_t total_rows = transpose ? y.size(0) : total,
                total_columns = transpose ? total : y.size(0);

  ArrayJaggedBmmJaggedOutParams params;
  params.a = elements.const_data_ptr();
  params.y = rows.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.matrices = view_matrices(bounds, total_rows, total_columns, a.size(0));
  params.columns = y.size(1);
  params.y_stride = rows.stride(0);
  params.y_vectors = has_aligned_lines(rows, {0});
  params.transpose = transpose;
  params.mma_sync_only = mma_sync_only(op);
  params.overlaps = overlaps;
  params.type = element_type(a.scalar_type(), allow_tf32);
  check_cuda(op, launch_array_jagged_bmm_jagged_out(params, stream));
  return out;
}

}  // namespace jagged_cuda
