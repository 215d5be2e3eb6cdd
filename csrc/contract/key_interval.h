// A range of keys, as tensors [..., 2] int32 hold it.
#pragma once

#include <cstdint>

namespace jagged_cuda {

// Keys [begin, end), counted from the sequence's first.
struct alignas(8) KeyInterval {
  int32_t begin = 0;
  int32_t end = 0;
};

}  // namespace jagged_cuda
