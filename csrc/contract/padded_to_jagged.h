// padded_to_jagged: the rows of padded sequences one after another.
#pragma once

#include "contract/rows.h"

namespace jagged_cuda {

struct PaddedToJaggedSizes {
  int64_t num_seqs;  // B
  int64_t max_len;   // M
  int64_t columns;   // product of the dimensions after the second
  int64_t total;     // T
};

// x [B, M, ...], offsets [B + 1]
inline PaddedToJaggedSizes parse_padded_to_jagged(const Tensor& x, const Tensor& offsets,
                                                  int64_t total) {
  constexpr const char* op = "padded_to_jagged";
  if (x.dim() < 2) fail_argument(op, "x", "[B, M, ...]", shape_text(x));
  check_copied(op, "x", x);
  check_offsets(op, "offsets", offsets, x);
  const int64_t num_seqs = offsets.size(0) - 1;
  if (x.size(0) != num_seqs) {
    fail_argument(op, "x", shape_text(with_rows_of(x, 1, {num_seqs})), shape_text(x));
  }
  check_not_negative(op, "total", total);
  return {num_seqs, x.size(1), row_elems(x, 2), total};
}

}  // namespace jagged_cuda
