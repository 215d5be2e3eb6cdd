// Which offsets are right: one rule for the CPU, for the synchronous check and for the kernel that
// checks on the device. Free of torch headers, since nvcc compiles it too.
//
// A rule looks at one index and names the first thing that is wrong there. Its caller loops over
// the indices, or shares them among threads, and keeps the smallest that is wrong.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAGGED_CUDA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAGGED_CUDA_HOST_DEVICE inline
#endif

namespace jagged_cuda {

enum class Fault : int32_t {
  kNone,
  kNegative,     // offsets[index] = value < 0
  kDecreasing,   // offsets[index] = value < offsets[index - 1] = reference
  kPastTheEnd,   // offsets[index] = value > reference, the number of rows
  kTooLong,      // sequence `index` has `value` rows, more than max_len = reference
  kCapacity,     // the capacity `value` is less than the `reference` that are needed
  kMatrixBegin,  // matrix_offsets[0] = value < 0
  kMatrixSum,    // matrix_offsets[index] = value, not that before it + rows * columns = reference
  kOutOfRange,   // index[index] = value is none of `reference` sequences
  kMatrixCapacity,  // the matrix of sequence `index` ends at `reference`, past the capacity `value`
};

struct Finding {
  Fault fault = Fault::kNone;
  int64_t index = 0;
  int64_t value = 0;
  int64_t reference = 0;
  int64_t rows = 0;  // of a matrix
  int64_t columns = 0;
};

constexpr int64_t kUnlimited = INT64_MAX;  // a bound that is not checked

// offsets [num_seqs + 1] into `total` rows.
template <typename Offset>
struct OffsetsRule {
  const Offset* offsets;
  int64_t num_seqs;
  int64_t total;
  int64_t max_len;

  // `index` from 0 to num_seqs.
  JAGGED_CUDA_HOST_DEVICE Finding at(int64_t index) const {
    const int64_t value = offsets[index];
    if (index == 0) {
      if (value < 0) return {Fault::kNegative, index, value};
      // Else named where the first sequence ends.
      if (num_seqs == 0 && value > total) return {Fault::kPastTheEnd, index, value, total};
      return {};
    }
    const int64_t before = offsets[index - 1];
    if (value < before) return {Fault::kDecreasing, index, value, before};
    if (value > total) return {Fault::kPastTheEnd, index, value, total};
    if (value - before > max_len) return {Fault::kTooLong, index - 1, value - before, max_len};
    return {};
  }
};

// counts [num_seqs + 1]: numbers of rows, one of each sequence.
template <typename Count>
struct CountsRule {
  const Count* counts;
  int64_t num_seqs;  // one less than there are counts

  JAGGED_CUDA_HOST_DEVICE Finding at(int64_t index) const {
    const int64_t value = counts[index];
    return value < 0 ? Finding{Fault::kNegative, index, value} : Finding{};
  }
};

// needed [1]: how many elements there are, of which a result holds `capacity`.
struct CapacityRule {
  const int64_t* needed;
  int64_t num_seqs;  // 0: one number
  int64_t capacity;

  JAGGED_CUDA_HOST_DEVICE Finding at(int64_t index) const {
    const int64_t value = needed[index];
    return value > capacity ? Finding{Fault::kCapacity, index, capacity, value} : Finding{};
  }
};

// index [num_seqs], each the number of one of num_chosen sequences.
struct IndexRule {
  const int64_t* index;
  int64_t num_seqs;  // of the result
  int64_t num_chosen;

  JAGGED_CUDA_HOST_DEVICE Finding at(int64_t entry) const {
    if (entry >= num_seqs || (index[entry] >= 0 && index[entry] < num_chosen)) return {};
    return {Fault::kOutOfRange, entry, index[entry], num_chosen};
  }
};

// matrix_offsets [num_seqs + 1], the running sum of the sizes of matrices in `capacity` elements;
// the offsets of their rows and columns are right.
template <typename Offset>
struct MatrixOffsetsRule {
  const Offset* rows;
  const Offset* columns;
  const int64_t* offsets;
  int64_t num_seqs;
  int64_t capacity;

  JAGGED_CUDA_HOST_DEVICE Finding at(int64_t index) const {
    const int64_t value = offsets[index];
    if (index == 0) {
      return value < 0 ? Finding{Fault::kMatrixBegin, index, value} : Finding{};
    }
    const int64_t num_rows = rows[index] - rows[index - 1];
    const int64_t num_columns = columns[index] - columns[index - 1];
    const int64_t end = offsets[index - 1] + num_rows * num_columns;
    if (value != end) return {Fault::kMatrixSum, index, value, end, num_rows, num_columns};
    if (num_rows * num_columns > 0 && end > capacity) {
      return {Fault::kMatrixCapacity, index - 1, capacity, end};
    }
    return {};
  }
};

}  // namespace jagged_cuda
