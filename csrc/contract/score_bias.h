// What is added to the scores of attention, as kernels of every backend read it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAGGED_DEVICE __host__ __device__
#else
#define JAGGED_DEVICE
#endif

namespace jagged_cuda {

// kv_bias[key] + time_table[bucket of q_time[row] - kv_time[key]] + position_table[bucket of the
// distance in rows], each of the column of the table that the query head reads: one of `heads`
// columns serves H / heads query heads in turn. Tables and kv_bias have the type of sums. Null
// pointers add nothing.
struct ScoreBias {
  const void* kv_bias;  // [Tk, kv_heads]
  int kv_heads;
  const void* time_table;  // [time_heads, time_buckets]; the three others are given with it
  int time_heads;
  int time_buckets;
  const int64_t* q_time;      // [Tq]
  const int64_t* kv_time;     // [Tk]
  const int64_t* boundaries;  // [time_buckets - 1], ascending
  bool symmetric;
  const void* position_table;  // [position_heads, position_buckets]
  int position_heads;
  int position_buckets;
  int64_t position_first;

  JAGGED_DEVICE bool any() const { return kv_bias != nullptr || has_tables(); }
  JAGGED_DEVICE bool has_tables() const {
    return time_table != nullptr || position_table != nullptr;
  }

  // How many boundaries are at most |row_time - key_time|, or 0 if that is negative and the bias
  // not symmetric.
  JAGGED_DEVICE int time_bucket(int64_t row_time, int64_t key_time) const {
    if (!symmetric && row_time < key_time) row_time = key_time;
    const uint64_t later = row_time > key_time ? row_time : key_time,
                   sooner = row_time > key_time ? key_time : row_time, away = later - sooner;
    int found = 0;
    for (int left = time_buckets - 1; left > 0;) {
      const int half = left / 2;
      const int64_t boundary = boundaries[found + half];
      const bool passed = boundary <= 0 || static_cast<uint64_t>(boundary) <= away;
      found = passed ? found + half + 1 : found;
      left = passed ? left - half - 1 : half;
    }
    return found;
  }

  // `distance`: the position of the row among the keys, less that of the key.
  JAGGED_DEVICE int position_bucket(int64_t distance) const {
    const int64_t index = distance - position_first;
    const int last = position_buckets - 1;
    return index < 0 ? 0 : (index > last ? last : static_cast<int>(index));
  }
};

}  // namespace jagged_cuda

#undef JAGGED_DEVICE
