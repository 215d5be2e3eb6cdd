// A number of rows for each sequence, of its own or the same for all.
#pragma once

#include <cstdint>

namespace jagged_cuda {

struct CountsView {
  const void* data;  // [B], int64 if `wide`, else int32; null: `same` for every sequence
  int64_t same;
  bool wide;
};

#ifdef __CUDACC__

// That of sequence `seq`, which has `len` rows: from 0 to len, whatever is given.
__device__ __forceinline__ int64_t clamped_count(const CountsView& counts, int64_t seq,
                                                 int64_t len) {
  int64_t count = counts.same;
  if (counts.data != nullptr) {
    count = counts.wide ? __ldg(static_cast<const long long*>(counts.data) + seq)
                        : static_cast<int64_t>(__ldg(static_cast<const int*>(counts.data) + seq));
  }
  return count < 0 ? 0 : (count > len ? len : count);
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
