// Which elements dropout sets to 0, the same on every backend: a function of the seed and of the
// element's place alone, so that a backward pass draws the same ones again.
//
// Random words are Philox 4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes,
// Dror and Shaw, SC '11): ten rounds, in each of which two products of 32 bits are split into
// halves and mixed with a key that grows by a constant. The key is the seed (low word, high word),
// the counter (column / 4, row's low word, row's high word, 0), and element (row, column) takes
// word column % 4. It is dropped if the word is less than p 2^32, and else times 1 / (1 - p).
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

constexpr int kDropoutWords = 4;  // columns that share a counter

// The words of 4 kBlocks columns of a row, from column 4 * block on. Rounds are the outer loop, so
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

struct Dropout {
  bool drops;           // false: nothing
  uint32_t drop_up_to;  // words up to this one drop their element
  double kept_scale;    // of the others
};

// For 0 <= p <= 1.
inline Dropout dropout_of(double p) {
  const uint64_t dropped = static_cast<uint64_t>(p * 4294967296.0);
  return {dropped > 0, static_cast<uint32_t>(dropped - 1), 1.0 / (1.0 - p)};
}

}  // namespace jagged_cuda
