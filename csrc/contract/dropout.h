// Which elements dropout sets to 0, the same on every backend: a function of the seed and of the
// element's place alone, so that a backward pass draws the same ones again.
//
// Random words are Philox 4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes,
// Dror and Shaw, SC '11): ten rounds, in each of which two products of 32 bits are split into
// halves and mixed with a key that grows by a constant. The key is the seed (low word, high word),
// the counter (column / 4, row's low word, row's high word, 0), and element (row, column) takes
// word column % 4. It is dropped if the word is less than p 2^32.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAGGED_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAGGED_HOST_DEVICE inline
#endif

namespace jagged_cuda {

constexpr int kDropoutWords = 4;  // columns that share a counter

struct RandomWords {
  uint32_t words[kDropoutWords];
};

JAGGED_HOST_DEVICE RandomWords philox_4x32_10(uint64_t key, const RandomWords& counter) {
  uint32_t c0 = counter.words[0], c1 = counter.words[1], c2 = counter.words[2],
           c3 = counter.words[3];
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The words of columns 4 block to 4 block + 3 of a row.
JAGGED_HOST_DEVICE RandomWords dropout_words(uint64_t seed, int64_t row, int64_t block) {
  const uint64_t global_row = static_cast<uint64_t>(row);
  return philox_4x32_10(seed, {{static_cast<uint32_t>(block), static_cast<uint32_t>(global_row),
                                static_cast<uint32_t>(global_row >> 32), 0}});
}

// p 2^32 for 0 <= p < 1: words below it drop their element.
inline uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 4294967296.0); }

}  // namespace jagged_cuda
