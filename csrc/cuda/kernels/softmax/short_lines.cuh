// Lines in shared memory that a warp keeps in registers, in place: read once, written once.
//
// 2^lanes_log2 lanes share a line, and 2^(5 - lanes_log2) lines are computed abreast by a warp. Each
// lane takes every 2^lanes_log2-th element, up to kItems. There is straight code for every fourth
// number of items; those that a lane lacks are filled up with what counts for nothing.
//
// The lines that a warp computes abreast are a group. Warps take the groups of up to 32 matrices in
// turn, without a barrier.
#pragma once

#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/softmax/span_shared.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

// An element at an address of shared memory.
template <typename Element>
__device__ __forceinline__ Sum<Element> load_shared(uint32_t address) {
  if constexpr (std::is_same_v<Element, double>) {
    return ptx::ld_shared_f64(address);
  } else if constexpr (std::is_same_v<Element, float>) {
    return ptx::ld_shared_f32(address);
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(ptx::ld_shared_2(address))));
  } else {
    return __uint_as_float(ptx::ld_shared_2(address) << 16);
  }
}

__device__ __forceinline__ int log2_ceil(int x) { return x <= 1 ? 0 : 32 - __clz(x - 1); }

__device__ __forceinline__ int lanes_of_long_lines(int64_t lines, bool over_rows) {
  return over_rows ? 5 - log2_ceil(lines < 32 ? static_cast<int>(lines) : 32) : 5;
}

// How many lanes share a line of a matrix, which depends on its shape alone: as many as the registers
// of all must have; more where there are fewer lines than lanes.
template <typename Config>
__device__ __forceinline__ int choose_lanes_log2(int64_t lines, int64_t len, bool over_rows) {
  if (len > Config::kMaxShort) return lanes_of_long_lines(lines, over_rows);
  const int elems = static_cast<int>(len);
  int lanes_log2 = log2_ceil((elems + Config::kItems - 1) / Config::kItems);
  int wanted = 5 - log2_ceil(lines < 32 ? static_cast<int>(lines) : 32);
  // Rows that begin in few banks: no more than two abreast.
  if (!over_rows && elems * static_cast<int>(sizeof(typename Config::Element)) % 32 == 0) {
    wanted = max(wanted, 4);
  }
  wanted = min(wanted, log2_ceil(elems));
  return max(lanes_log2, wanted);
}

// Reduces over the lanes that share a line: lane ^ step, lane ^ 2 step, ..., lane ^ limit / 2.
template <typename S, typename Combine>
__device__ __forceinline__ S combine_lanes(S value, int step, int limit, Combine combine) {
#pragma unroll 1
  for (; step < limit; step *= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// A lane's part of a line: `count` elements, `step` bytes apart, from the address `first` on. Another
// lane may have one more or less.
struct LanePart {
  uint32_t first, step;
  int count;
  int xor_step, xor_limit;
};

// The last kMaybe items of kItems may be missing; all others exist.
constexpr int kMaybe = 4;

// Addresses are computed again each time: to keep those of all items would cost their registers.
template <int kItems, typename Visit>
__device__ __forceinline__ void for_each_address(const LanePart& part, uint32_t offset,
                                                 Visit visit) {
  uint32_t address = ptx::opaque(part.first + offset);
#pragma unroll
  for (int i = 0; i < kItems; ++i, address += part.step) {
    if (i < kItems - kMaybe || i < part.count) visit(i, address);
  }
}

template <typename Element, int kItems, typename S>
__device__ __forceinline__ void load_part(const LanePart& part, uint32_t offset, S missing,
                                          S (&rX)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) rX[i] = missing;
  for_each_address<kItems>(part, offset,
                           [&](int i, uint32_t address) { rX[i] = load_shared<Element>(address); });
}

template <typename Element, int kItems, typename S>
__device__ __forceinline__ void store_part(const LanePart& part, const S (&rX)[kItems]) {
  if constexpr (sizeof(Element) == 2) {
    // Two are rounded by one instruction.
    uint32_t rPairs[kItems / 2];
#pragma unroll
    for (int i = 0; i < kItems / 2; ++i) rPairs[i] = pack<Element>(rX[2 * i], rX[2 * i + 1]);
    for_each_address<kItems>(part, 0, [&](int i, uint32_t address) {
      ptx::st_shared_2(address, i % 2 == 0 ? rPairs[i / 2] : rPairs[i / 2] >> 16);
    });
  } else {
    for_each_address<kItems>(part, 0, [&](int i, uint32_t address) {
      if constexpr (sizeof(Element) == 4) {
        ptx::st_shared_f32(address, rX[i]);
      } else {
        ptx::st_shared_f64(address, rX[i]);
      }
    });
  }
}

template <typename Element, int kItems, typename S>
__device__ __forceinline__ void softmax_part(const LanePart& part, const Scale<S>& scale) {
  S rX[kItems];
  S maximum = minus_infinity<S>();
  load_part<Element>(part, 0, minus_infinity<S>(), rX);
#pragma unroll
  for (int i = 0; i < kItems; ++i) maximum = ptx::max_nan(maximum, rX[i]);
  maximum = combine_lanes(maximum, part.xor_step, part.xor_limit,
                          [](S a, S b) { return ptx::max_nan(a, b); });
  maximum = shift_of(maximum);
  SumOfExponentials<Element> sum;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    rX[i] = scale.exponential(rX[i], maximum);
    sum.add(rX[i]);
  }
  sum.value =
      combine_lanes(sum.value, part.xor_step, part.xor_limit, [](auto a, auto b) { return a + b; });
  const S inverse = sum.inverse();
#pragma unroll
  for (int i = 0; i < kItems; ++i) rX[i] *= inverse;
  __syncwarp();  // lanes without a line of their own have read another's
  store_part<Element>(part, rX);
}

// The other operand lies `grad_offset` bytes further.
template <typename Element, int kItems, typename S>
__device__ __forceinline__ void softmax_part_backward(const LanePart& part, uint32_t grad_offset,
                                                      const Scale<S>& scale) {
  S rP[kItems], rGrad[kItems];
  S sum = S(0);
  load_part<Element>(part, 0, S(0), rP);
  load_part<Element>(part, grad_offset, S(0), rGrad);
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum = fma(rP[i], rGrad[i], sum);
  sum = combine_lanes(sum, part.xor_step, part.xor_limit, [](S a, S b) { return a + b; });
#pragma unroll
  for (int i = 0; i < kItems; ++i) rP[i] *= scale.exponent * (rGrad[i] - sum);
  __syncwarp();  // lanes without a line of their own have read another's
  store_part<Element>(part, rP);
}

// With as few items as all lanes' parts have at most.
template <typename Config, int kItems, typename S>
__device__ __forceinline__ void softmax_at_most(int most, const LanePart& part, int buffer,
                                                const Scale<S>& scale) {
  using Element = typename Config::Element;
  if constexpr (kItems > kMaybe) {
    if (most <= kItems - kMaybe) {
      softmax_at_most<Config, kItems - kMaybe>(most, part, buffer, scale);
      return;
    }
  }
  if constexpr (Config::kBackward) {
    softmax_part_backward<Element, kItems>(part, sizeof(Element) * buffer, scale);
  } else {
    softmax_part<Element, kItems>(part, scale);
  }
}

// Writes down the lines of up to 32 matrices, of which each lane of a warp describes one.
template <typename Config>
__device__ __forceinline__ void write_lines(LinesOf32& shared, LinesInShared lines) {
  const int lane = threadIdx.x % 32, abreast_log2 = 5 - lines.lanes_log2;
  const bool is_long = lines.count > 0 && lines.len > Config::kMaxShort;
  int end = is_long ? 0 : (lines.count + (1 << abreast_log2) - 1) >> abreast_log2;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, end, step);
    if (lane >= step) end += before;
  }
  lines.groups_end = end;
  shared.lines[lane] = lines;
  const unsigned long_ones = __ballot_sync(kAllLanes, is_long);
  if (lane == 0) shared.long_ones = long_ones;
}

// The short lines among these: groups first, first + step, ... of them; a whole warp.
template <typename Config, typename S>
__device__ __forceinline__ void softmax_short_lines(const LinesOf32& shared, int first, int step,
                                                    int buffer, bool over_rows,
                                                    const Scale<S>& scale) {
  const uint32_t base = ptx::shared_address(span_shared<Config>().elems);
  const int lane = threadIdx.x % 32;
  const int end = shared.lines[lane].groups_end, total = shared.lines[31].groups_end;
#pragma unroll 1
  for (int group = first; group < total; group += step) {
    const int owner = __popc(__ballot_sync(kAllLanes, end <= group));
    const LinesInShared& lines = shared.lines[owner];
    const int lanes_log2 = lines.lanes_log2, abreast_log2 = 5 - lanes_log2, pitch = lines.pitch;
    // The last group ends with the last line; lanes without a line of their own repeat that one.
    const int groups = (lines.count + (1 << abreast_log2) - 1) >> abreast_log2;
    const int first_line = (group - (lines.groups_end - groups)) << abreast_log2;
    const int own_line = over_rows ? lane & ((1 << abreast_log2) - 1) : lane >> lanes_log2;
    const int line = min(first_line + own_line, lines.count - 1);
    constexpr int kBytes = sizeof(typename Config::Element);
    const int phase = over_rows ? lane >> abreast_log2 : lane & ((1 << lanes_log2) - 1);
    const int most = (lines.len + (1 << lanes_log2) - 1) >> lanes_log2;
    LanePart part;
    part.first = base + kBytes * (lines.first + line * (over_rows ? 1 : pitch) +
                                  phase * (over_rows ? pitch : 1));
    part.step = kBytes * (over_rows ? pitch : 1) << lanes_log2;
    part.count = (lines.len - phase + (1 << lanes_log2) - 1) >> lanes_log2;
    part.xor_step = over_rows ? 1 << abreast_log2 : 1;
    part.xor_limit = over_rows ? 32 : 1 << lanes_log2;
    softmax_at_most<Config, Config::kItems>(most, part, buffer, scale);
  }
}

}  // namespace jagged_cuda::softmax
