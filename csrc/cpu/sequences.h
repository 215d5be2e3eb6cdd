// Offsets as sequences, and tensors as what the compute kernels take.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "contract/checks.h"
#include "contract/contract.h"

namespace jagged_cuda::cpu {

inline Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return Element::kDouble;
    case ScalarType::Half:
      return Element::kHalf;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    default:
      return Element::kFloat;
  }
}

// The number of rows is that of a tensor, or a capacity, which the caller has chosen and which may
// be less than the sequences have.
enum class RowsOf { kTensor, kCapacity };

// The sequences of offsets [B + 1] in `total` rows, cut there. Offsets that decrease, or reach past
// the end of a tensor, are an error; JAGGED_CUDA_CHECK asks for a check of max_len and
// capacities too.
std::vector<Sequence> read_sequences(const char* op, const char* argument, const Tensor& offsets,
                                     int64_t total, std::optional<int64_t> max_len = std::nullopt,
                                     RowsOf rows_of = RowsOf::kTensor);

// One number of rows for each sequence: those of `counts` [B], or `same` for all.
std::vector<int64_t> read_counts(const char* op, const char* argument,
                                 const std::optional<Tensor>& counts, int64_t same,
                                 int64_t num_seqs);

constexpr int64_t kByteCost = 2;  // of a copy, in multiply-adds

// Copies rows that lie `from_bytes` apart to contiguous ones.
inline void copy_rows(char* to, const char* from, int64_t rows, int64_t row_bytes,
                      int64_t from_bytes) {
  if (from_bytes == row_bytes && rows > 0) {
    std::memcpy(to, from, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * row_bytes, from + row * from_bytes, static_cast<size_t>(row_bytes));
  }
}

// Zeros for the rows that lie before the first and after the last sequence.
void zero_rows_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t row_bytes,
                       void* out);

}  // namespace jagged_cuda::cpu
