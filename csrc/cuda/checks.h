// Checking offsets on CUDA, as JAGGED_CUDA_CHECK asks for it (contract/checks.h).
//
// "1" waits for the stream, and throws what it finds; a stream that is being captured into a graph
// cannot be waited for, so nothing is checked there. "async" waits for nothing: a kernel leaves what
// it finds in an error word, in graphs too, and the next call, or jagged_cuda.check_errors(),
// throws it.
#pragma once

#include "contract/contract.h"

#include <cstdint>
#include <optional>

namespace jagged_cuda {

// offsets [B + 1] into `total` rows. Contiguous, and alive until the stream has passed. Only the
// first check of a call throws what an earlier call left: its own may be done already.
void maybe_validate_offsets(const char* op, const char* argument, const Tensor& offsets,
                            int64_t total, std::optional<int64_t> max_len = std::nullopt,
                            bool is_first = true);

// counts [B], numbers of rows. Contiguous, and alive until the stream has passed.
void maybe_validate_counts(const char* op, const char* argument, const Tensor& counts);

// needed [1] int64: how many elements there are, of which a result holds `capacity`; `argument`
// gives it.
void maybe_validate_capacity(const char* op, const char* argument, const Tensor& needed,
                             int64_t capacity);

// index [N], int64, each the number of one of `num_seqs` sequences. Contiguous, as above.
void maybe_validate_index(const char* op, const char* argument, const Tensor& index,
                          int64_t num_seqs);

// Offsets of the rows and columns of matrices, and matrix_offsets: each contiguous, [B + 1].
// `argument` gives the `capacity`.
void maybe_validate_matrices(const char* op, const char* argument, const Tensor& rows,
                             const Tensor& columns, bool has_y_offsets,
                             const Tensor& matrix_offsets, int64_t total_rows,
                             int64_t total_columns, int64_t capacity);

}  // namespace jagged_cuda
