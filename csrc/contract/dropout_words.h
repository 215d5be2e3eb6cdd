// The random words of dropout (dropout.h).
//
// Philox 4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes, Dror and Shaw,
// SC '11): ten rounds, in each of which two products of 32 bits are split into halves and mixed
// with a key that grows by a constant. The key is the seed (low word, high word), the counter
// (column / 8, row's low word, row's high word, 0).
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

// Where 8 neighbouring elements are: in columns 8 block to 8 block + 7 of a row.
struct DropoutPlace {
  int64_t row;
  int64_t block;
};

// The words of kCount places. Rounds are the outer loop, so that all share a round's key.
template <int kCount>
JAGGED_HOST_DEVICE void dropout_words(uint32_t (&words)[kCount][kDropoutWords], uint64_t seed,
                                      const DropoutPlace (&places)[kCount]) {
  constexpr int kRounds = 10;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0[kCount], c1[kCount], c2[kCount], c3[kCount];
  JAGGED_UNROLL
  for (int i = 0; i < kCount; ++i) {
    c0[i] = static_cast<uint32_t>(places[i].block);
    c1[i] = static_cast<uint32_t>(places[i].row);
    c2[i] = static_cast<uint32_t>(places[i].row >> 32);
    c3[i] = 0;
  }
  JAGGED_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    JAGGED_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0[i];
      const uint64_t product2 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(product2 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<uint32_t>(product2);
      c3[i] = static_cast<uint32_t>(product0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  JAGGED_UNROLL
  for (int i = 0; i < kCount; ++i) {
    words[i][0] = c0[i];
    words[i][1] = c1[i];
    words[i][2] = c2[i];
    words[i][3] = c3[i];
  }
}

// The half that a column takes, in the high half of a word.
JAGGED_HOST_DEVICE uint32_t dropout_half(uint32_t word, int column) {
  return column % 2 == 0 ? word << 16 : word;
}

}  // namespace jagged_cuda
