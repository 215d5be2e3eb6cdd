// Which elements dropout sets to 0, the same on every backend: a function of the seed and of the
// element's place alone, so that a backward pass draws the same ones again.
//
// Random words are Philox 4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes,
// Dror and Shaw, SC '11): ten rounds, in each of which two products of 32 bits are split into
// halves and mixed with a key that grows by a constant. The key is the seed (low word, high word),
// the counter (column / 8, row's low word, row's high word, 0). Element (row, column) takes word
// column % 8 / 2, its low half in even columns and its high half in odd ones. It is dropped if that
// half is less than t = p 2^16, rounded, and else times 1 / (1 - t / 2^16).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAGGED_HOST_DEVICE __host__ __device__ __forceinline__
#define JAGGED_UNROLL _Pragma("unroll")
#else
#define JAGGED_HOST_DEVICE inline __attribute__((always_inline))
#define JAGGED_UNROLL
#endif

namespace jagged_cuda {

constexpr int kDropoutColumns = 8;  // that share a counter
constexpr int kDropoutWords = 4;

// The words of 8 kBlocks columns of a row, from column 8 * block on. Rounds are the outer loop, so
// that all blocks share a round's key.
template <int kBlocks>
JAGGED_HOST_DEVICE void dropout_words(uint32_t (&words)[kBlocks][kDropoutWords], uint64_t seed,
                                      int64_t row, int64_t block) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  JAGGED_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    c0[b] = static_cast<uint32_t>(block + b);
    c1[b] = static_cast<uint32_t>(row);
    c2[b] = static_cast<uint32_t>(row >> 32);
    c3[b] = 0;
  }
  JAGGED_UNROLL
  for (int round = 0; round < 10; ++round) {
    JAGGED_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0[b];
      const uint64_t product2 = uint64_t{0xCD9E8D57u} * c2[b];
      c0[b] = static_cast<uint32_t>(product2 >> 32) ^ c1[b] ^ k0;
      c2[b] = static_cast<uint32_t>(product0 >> 32) ^ c3[b] ^ k1;
      c1[b] = static_cast<uint32_t>(product2);
      c3[b] = static_cast<uint32_t>(product0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  JAGGED_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    words[b][0] = c0[b];
    words[b][1] = c1[b];
    words[b][2] = c2[b];
    words[b][3] = c3[b];
  }
}

// The half that a column takes, in the high half of a word.
JAGGED_HOST_DEVICE uint32_t dropout_half(uint32_t word, int column) {
  return column % 2 == 0 ? word << 16 : word;
}

struct Dropout {
  bool drops;           // false: nothing
  uint32_t drop_up_to;  // what dropout_half gives, up to this, drops its element
  double kept_scale;    // of the others
};

// For 0 <= p <= 1.
inline Dropout dropout_of(double p) {
  const uint64_t dropped = static_cast<uint64_t>(p * 65536.0 + 0.5);
  return {dropped > 0, static_cast<uint32_t>((dropped << 16) - 1),
          65536.0 / static_cast<double>(65536 - dropped)};
}

}  // namespace jagged_cuda
