// jagged_broadcast: each row of a sequence gets what the sequence has.
#pragma once

#include "contract/rows.h"

namespace jagged_cuda {

struct JaggedBroadcastSizes {
  int64_t num_seqs;  // B
  int64_t columns;   // product of the dimensions after the first
  int64_t total;     // T
};

// x [B, ...], offsets [B + 1]
inline JaggedBroadcastSizes parse_jagged_broadcast(const Tensor& x, const Tensor& offsets,
                                                   int64_t total) {
  constexpr const char* op = "jagged_broadcast";
  if (x.dim() < 1) fail_argument(op, "x", "[B, ...]", shape_text(x));
  check_copied(op, "x", x);
  check_offsets(op, "offsets", offsets, x);
  const int64_t num_seqs = offsets.size(0) - 1;
  if (x.size(0) != num_seqs) {
    fail_argument(op, "x", shape_text(with_rows_of(x, 1, {num_seqs})), shape_text(x));
  }
  check_not_negative(op, "total", total);
  return {num_seqs, row_elems(x, 1), total};
}

}  // namespace jagged_cuda
