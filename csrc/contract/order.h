// Scores as unsigned integers of the same order, for the CPU and for CUDA: NaN ranks last, below
// -inf, and -0 equals 0. Free of torch headers, since nvcc compiles it too.
#pragma once

#include "contract/offsets_rule.h"

#include <cstdint>
#include <cstring>

namespace jagged_cuda {

// Of the bits of a floating number: its sign is the highest, and what is left grows with its size.
template <typename Bits>
JAGGED_CUDA_HOST_DEVICE Bits ordered_float_bits(Bits bits, Bits infinity) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const Bits magnitude = static_cast<Bits>(bits & ~kSign);
  if (magnitude > infinity) return 0;  // NaN
  if (magnitude == 0) return kSign;
  return static_cast<Bits>((bits & kSign) != 0 ? ~bits : bits | kSign);
}

template <typename Bits, typename Value>
JAGGED_CUDA_HOST_DEVICE Bits bits_of(const Value& value) {
  static_assert(sizeof(Bits) == sizeof(Value));
  Bits bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAGGED_CUDA_HOST_DEVICE uint32_t ordered_key(float value) {
  return ordered_float_bits<uint32_t>(bits_of<uint32_t>(value), 0x7f800000u);
}

JAGGED_CUDA_HOST_DEVICE uint64_t ordered_key(double value) {
  return ordered_float_bits<uint64_t>(bits_of<uint64_t>(value), 0x7ff0000000000000ull);
}

// Of 16-bit numbers.
constexpr uint16_t kHalfInfinity = 0x7c00, kBFloat16Infinity = 0x7f80;

JAGGED_CUDA_HOST_DEVICE uint8_t ordered_key(uint8_t value) { return value; }
JAGGED_CUDA_HOST_DEVICE uint8_t ordered_key(int8_t value) {
  return static_cast<uint8_t>(static_cast<uint8_t>(value) ^ 0x80u);
}
JAGGED_CUDA_HOST_DEVICE uint16_t ordered_key(int16_t value) {
  return static_cast<uint16_t>(static_cast<uint16_t>(value) ^ 0x8000u);
}
JAGGED_CUDA_HOST_DEVICE uint32_t ordered_key(int32_t value) {
  return static_cast<uint32_t>(value) ^ 0x80000000u;
}
JAGGED_CUDA_HOST_DEVICE uint64_t ordered_key(int64_t value) {
  return static_cast<uint64_t>(value) ^ 0x8000000000000000ull;
}

}  // namespace jagged_cuda
