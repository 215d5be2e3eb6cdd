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

template <class Offset>
std::vector<Sequence> sequences_of(const char* op, const char* argument, const Offset* offsets,
                                   int64_t num_seqs, int64_t total, std::optional<int64_t> max_len,
                                   RowsOf rows_of) {
  const bool all = check_mode() != CheckMode::kOff;
  enforce(
      op, argument,
      OffsetsRule<Offset>{offsets, num_seqs, all || rows_of == RowsOf::kTensor ? total : kUnlimited,
                          all && max_len ? *max_len : kUnlimited});
  std::vector<Sequence> sequences(static_cast<size_t>(num_seqs));
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t begin = std::min<int64_t>(offsets[seq], total);
    const int64_t end = std::min<int64_t>(offsets[seq + 1], total);
    sequences[static_cast<size_t>(seq)] = {begin, end - begin};
  }
  return sequences;
}

// The sequences of offsets [B + 1] in `total` rows, cut there. Offsets that decrease, or reach past
// the end of a tensor, are an error; JAGGED_CUDA_CHECK asks for a check of max_len and
// capacities too.
inline std::vector<Sequence> read_sequences(const char* op, const char* argument,
                                            const Tensor& offsets, int64_t total,
                                            std::optional<int64_t> max_len = std::nullopt,
                                            RowsOf rows_of = RowsOf::kTensor) {
  const Tensor dense = contiguous(offsets);
  const int64_t num_seqs = dense.size(0) - 1;
  if (dense.scalar_type() == ScalarType::Int) {
    return sequences_of(op, argument, dense.const_data_ptr<int32_t>(), num_seqs, total, max_len,
                        rows_of);
  }
  return sequences_of(op, argument, dense.const_data_ptr<int64_t>(), num_seqs, total, max_len,
                      rows_of);
}

// One number of rows for each sequence: those of `counts` [B], or `same` for all.
inline std::vector<int64_t> read_counts(const char* op, const char* argument,
                                        const std::optional<Tensor>& counts, int64_t same,
                                        int64_t num_seqs) {
  if (!counts) return std::vector<int64_t>(static_cast<size_t>(num_seqs), same);
  const Tensor dense = contiguous(*counts);
  const auto read = [&](const auto* values) {
    enforce(op, argument, CountsRule<std::decay_t<decltype(*values)>>{values, num_seqs - 1});
    return std::vector<int64_t>(values, values + num_seqs);
  };
  if (dense.scalar_type() == ScalarType::Int) return read(dense.const_data_ptr<int32_t>());
  return read(dense.const_data_ptr<int64_t>());
}

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
inline void zero_rows_outside(const std::vector<Sequence>& sequences, int64_t total,
                              int64_t row_bytes, void* out) {
  const int64_t begin = sequences.empty() ? total : sequences.front().begin;
  const int64_t end = sequences.empty() ? total : sequences.back().begin + sequences.back().len;
  if (row_bytes == 0 || total == 0) return;
  char* bytes = static_cast<char*>(out);
  std::memset(bytes, 0, static_cast<size_t>(begin * row_bytes));
  std::memset(bytes + end * row_bytes, 0, static_cast<size_t>((total - end) * row_bytes));
}

}  // namespace jagged_cuda::cpu
