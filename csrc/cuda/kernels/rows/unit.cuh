// Copying rows in units of 1, 2, 4, 8 or 16 bytes, whatever their elements are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace jagged_cuda::rows {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 32;  // of the result, for each warp
constexpr int kItems = 4;  // units that a lane has in flight

// How the lanes of a warp share rows: as many are beside each other as a row has units, at most
// all, and the others take the next rows.
inline int lanes_log2(int64_t row_units) {
  int log2 = 0;
  while (log2 < 5 && (int64_t{1} << log2) < row_units) ++log2;
  return log2;
}

// launch(unit) with a value of the type that is `unit_bytes` wide.
template <typename Launch>
cudaError_t with_unit(int unit_bytes, Launch launch) {
  switch (unit_bytes) {
    case 16:
      return launch(uint4{});
    case 8:
      return launch(uint2{});
    case 4:
      return launch(uint32_t{});
    case 2:
      return launch(uint16_t{});
    case 1:
      return launch(uint8_t{});
  }
  return cudaErrorInvalidValue;
}

// The registers of kVector elements, not yet taken apart.
template <typename Element, int kVector>
using Raw = std::conditional_t<
    sizeof(Element) * kVector == 16, uint4,
    std::conditional_t<
        sizeof(Element) == 8, uint2,
        std::conditional_t<sizeof(Element) == 4, uint32_t,
                           std::conditional_t<sizeof(Element) == 2, uint16_t, uint8_t>>>>;

}  // namespace jagged_cuda::rows
