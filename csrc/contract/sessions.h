// Where a session starts: one rule for the CPU and for CUDA. Free of torch headers, since nvcc
// compiles it too.
#pragma once

#include "contract/offsets_rule.h"

#include <cstdint>
#include <type_traits>

namespace jagged_cuda {

// How far time may rise within a session.
struct SessionGap {
  double number;
  uint64_t whole;  // for integers: what is more than `number` is more than this

  explicit SessionGap(double gap)
      : number(gap),
        whole(gap >= 0x1p64 ? UINT64_MAX
              : gap > 0     ? static_cast<uint64_t>(gap)
                            : 0) {}

  // Exact for integers, whatever their distance.
  JAGGED_CUDA_HOST_DEVICE bool is_exceeded(int64_t before, int64_t after) const {
    return after > before && static_cast<uint64_t>(after) - static_cast<uint64_t>(before) > whole;
  }
  JAGGED_CUDA_HOST_DEVICE bool is_exceeded(double before, double after) const {
    return after - before > number;
  }

  template <typename Time>
  JAGGED_CUDA_HOST_DEVICE bool is_exceeded(Time before, Time after) const {
    if constexpr (std::is_integral_v<Time>) {
      return is_exceeded(static_cast<int64_t>(before), static_cast<int64_t>(after));
    } else {
      return is_exceeded(static_cast<double>(before), static_cast<double>(after));
    }
  }
};

}  // namespace jagged_cuda
