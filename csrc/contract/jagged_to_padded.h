// jagged_to_padded: the rows of each sequence, up to max_len of them, side by side with the
// others'.
#pragma once

#include "contract/rows.h"

namespace jagged_cuda {

struct JaggedToPaddedSizes {
  int64_t total;     // T
  int64_t num_seqs;  // B
  int64_t max_len;   // M
  int64_t columns;   // product of the dimensions after the first
};

// x [T, ...], offsets [B + 1]
inline JaggedToPaddedSizes parse_jagged_to_padded(const Tensor& x, const Tensor& offsets,
                                                  int64_t max_len) {
  constexpr const char* op = "jagged_to_padded";
  if (x.dim() < 1) fail_argument(op, "x", "[T, ...]", shape_text(x));
  check_copied(op, "x", x);
  check_offsets(op, "offsets", offsets, x);
  check_not_negative(op, "max_len", max_len);
  return {x.size(0), offsets.size(0) - 1, max_len, row_elems(x, 1)};
}

}  // namespace jagged_cuda
