// What the glue of the operators over [sum Lx*Ly] shares.
#pragma once

#include "cuda/glue.h"
#include "contract/matrices.h"

#include "cuda/kernels/prim/matrices.cuh"

#include <vector>

namespace jagged_cuda {

// Contiguous offsets of matrices; must outlive the launch.
struct MatrixOffsets {
  Tensor rows;     // [B + 1], int32 or int64
  Tensor columns;  // [B + 1], of the same dtype
  Tensor begins;   // [B + 1], int64
};

// offsets, y_offsets (none: offsets) and matrix_offsets.
inline MatrixOffsets contiguous_offsets(const char* op, const Tensor& offsets,
                                        const std::optional<Tensor>& y_offsets,
                                        const Tensor& matrix_offsets) {
  const Tensor rows = as_contiguous(op, offsets);
  return {rows, y_offsets ? as_contiguous(op, *y_offsets) : rows,
          as_contiguous(op, matrix_offsets)};
}

inline MatricesView view_matrices(const MatrixOffsets& offsets, int64_t total_rows,
                                  int64_t total_columns, int64_t capacity) {
  return {view_offsets(offsets.rows, total_rows), view_offsets(offsets.columns, total_columns),
          static_cast<const int64_t*>(offsets.begins.const_data_ptr()), capacity};
}

// Under JAGGED_CUDA_CHECK=1, and outside a graph's capture: waits for the stream and names the
// first bad index, or the first matrix that does not fit into `capacity`, what `argument` says.
inline void maybe_validate_matrices(const char* op, const char* argument,
                                    const MatrixOffsets& offsets, bool has_y_offsets,
                                    int64_t total_rows, int64_t total_columns, int64_t capacity) {
  maybe_validate_offsets(op, "offsets", offsets.rows, total_rows);
  maybe_validate_offsets(op, has_y_offsets ? "y_offsets" : "offsets", offsets.columns,
                         total_columns);
  if (!checks_enabled()) return;
  const cudaStream_t stream = current_stream(offsets.rows);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(op, cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone) return;
  const int64_t num_seqs = offsets.rows.size(0) - 1;
  const auto copy = [&](const Tensor& tensor, auto zero) {
    std::vector<decltype(zero)> host(num_seqs + 1);
    check_cuda(op, cudaMemcpyAsync(host.data(), tensor.const_data_ptr(), host.size() * sizeof(zero),
                                   cudaMemcpyDeviceToHost, stream));
    check_cuda(op, cudaStreamSynchronize(stream));
    return host;
  };
  const auto validate = [&](auto zero) {
    const auto rows = copy(offsets.rows, zero), columns = copy(offsets.columns, zero);
    const auto begins = copy(offsets.begins, int64_t{0});
    validate_matrix_offsets(op, argument, rows.data(), columns.data(), begins.data(), num_seqs,
                            capacity);
  };
  if (offsets.rows.scalar_type() == ScalarType::Long) {
    validate(int64_t{0});
  } else {
    validate(int32_t{0});
  }
}

}  // namespace jagged_cuda
