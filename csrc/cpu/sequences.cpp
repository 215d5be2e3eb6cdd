#include "cpu/sequences.h"

#include <type_traits>

namespace jagged_cuda::cpu {

template <class Offset>
static std::vector<Sequence> sequences_of(const char* op, const char* argument,
                                          const Offset* offsets, int64_t num_seqs, int64_t total,
                                          std::optional<int64_t> max_len, RowsOf rows_of) {
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

std::vector<Sequence> read_sequences(const char* op, const char* argument, const Tensor& offsets,
                                     int64_t total, std::optional<int64_t> max_len,
                                     RowsOf rows_of) {
  const Tensor dense = contiguous(offsets);
  const int64_t num_seqs = dense.size(0) - 1;
  if (dense.scalar_type() == ScalarType::Int) {
    return sequences_of(op, argument, dense.const_data_ptr<int32_t>(), num_seqs, total, max_len,
                        rows_of);
  }
  return sequences_of(op, argument, dense.const_data_ptr<int64_t>(), num_seqs, total, max_len,
                      rows_of);
}

std::vector<int64_t> read_counts(const char* op, const char* argument,
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

void zero_rows_outside(const std::vector<Sequence>& sequences, int64_t total, int64_t row_bytes,
                       void* out) {
  const int64_t begin = sequences.empty() ? total : sequences.front().begin;
  const int64_t end = sequences.empty() ? total : sequences.back().begin + sequences.back().len;
  if (row_bytes == 0 || total == 0) return;
  char* bytes = static_cast<char*>(out);
  std::memset(bytes, 0, static_cast<size_t>(begin * row_bytes));
  std::memset(bytes + end * row_bytes, 0, static_cast<size_t>((total - end) * row_bytes));
}

}  // namespace jagged_cuda::cpu
