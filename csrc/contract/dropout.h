// Which elements dropout sets to 0, the same on every backend: a function of the seed and of the
// element's place alone, so that a backward pass draws the same ones again.
//
// A counter of random words (dropout_words.h) serves 8 neighbouring columns. Element (row, column)
// takes word column % 8 / 2 of its counter, the low half in even columns and the high half in odd
// ones. It is dropped if that half is less than t = p 2^16, rounded, and else times
// 1 / (1 - t / 2^16).
#pragma once

#include <cstdint>

namespace jagged_cuda {

struct Dropout {
  bool drops;           // false: nothing
  uint32_t drop_up_to;  // what dropout_half gives, up to this, drops its element
  double kept_scale;    // of the others; 0 where there are none, so that nothing becomes NaN
};

// For 0 <= p <= 1.
inline Dropout dropout_of(double p) {
  const uint64_t dropped = static_cast<uint64_t>(p * 65536.0 + 0.5);
  return {dropped > 0, static_cast<uint32_t>((dropped << 16) - 1),
          dropped < 65536 ? 65536.0 / static_cast<double>(65536 - dropped) : 0.0};
}

}  // namespace jagged_cuda
