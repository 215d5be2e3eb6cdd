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

// That of sequence `seq`, whatever is given.
__device__ __forceinline__ int64_t count_of(const CountsView& counts, int64_t seq) {
  if (counts.data == nullptr) return counts.same;
  return counts.wide ? __ldg(static_cast<const long long*>(counts.data) + seq)
                     : static_cast<int64_t>(__ldg(static_cast<const int*>(counts.data) + seq));
}

// The same of a sequence that has `len` rows: from 0 to len.
__device__ __forceinline__ int64_t clamped_count(const CountsView& counts, int64_t seq,
                                                 int64_t len) {
  const int64_t count = count_of(counts, seq);
  return count < 0 ? 0 : (count > len ? len : count);
}

#endif  // __CUDACC__

}  // namespace jagged_cuda
