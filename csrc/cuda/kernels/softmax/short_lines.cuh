// Lines in shared memory that a warp keeps in registers, in place: read once, written once.
//
// 2^lanes_log2 lanes share a line, and 2^(5 - lanes_log2) lines are computed abreast by a warp. Each
// lane takes every 2^lanes_log2-th element, up to kItems. Of a line shorter than what the registers
// hold, whole groups of items are skipped, and the last group is filled up with elements that count
// for nothing.
//
// The lines that a warp computes abreast are a group. Warps take the groups of up to 32 matrices in
// turn, without a barrier.
#pragma once

#include "cuda/kernels/softmax/span_shared.cuh"

namespace jagged_cuda::softmax {

template <typename Element>
__device__ __forceinline__ Element* advance(Element* pointer, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<Element>, const char, char>;
  return reinterpret_cast<Element*>(reinterpret_cast<Byte*>(pointer) + bytes);
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

// A lane's part of a line: elements phase, phase + 2^lanes_log2, ...; `first` and `step` in bytes of
// shared memory.
struct LanePart {
  int first, step;
  int phase, len, lanes_log2;
  int xor_step, xor_limit;

  // Calls visit(i, place, exists) with each item's index at compile time. Groups of items are skipped
  // together; `exists` is true at compile time for those that every lane has.
  template <int kItems, typename Visit>
  __device__ __forceinline__ void for_each_item(Visit visit) const {
    constexpr int kGroup = 4;
    const int whole = len >> lanes_log2, some = (len + (1 << lanes_log2) - 1) >> lanes_log2;
    int place = ptx::opaque(first);
#pragma unroll
    for (int group = 0; group < kItems; group += kGroup) {
      if (group + kGroup <= whole) {
#pragma unroll
        for (int i = group; i < group + kGroup; ++i, place += step) visit(i, place, true);
      } else if (group < some) {
#pragma unroll
        for (int i = group; i < group + kGroup; ++i, place += step) {
          visit(i, place, phase + (i << lanes_log2) < len);
        }
      }
    }
  }
  // The same where items that do not exist do no harm: visit(i)
  template <int kItems, typename Visit>
  __device__ __forceinline__ void for_each_filled(Visit visit) const {
    constexpr int kGroup = 4;
    const int some = (len + (1 << lanes_log2) - 1) >> lanes_log2;
#pragma unroll
    for (int group = 0; group < kItems; group += kGroup) {
      if (group < some) {
#pragma unroll
        for (int i = group; i < group + kGroup; ++i) visit(i);
      }
    }
  }
};

template <typename Config, typename S>
__device__ __forceinline__ void softmax_short_line(typename Config::Element* sX,
                                                   const LanePart& part, const Scale<S>& scale) {
  using Element = typename Config::Element;
  constexpr int kItems = Config::kItems;
  S rX[kItems];
  S maximum = minus_infinity<S>(), sum = S(0);
  part.for_each_item<kItems>([&](int i, int place, bool exists) {
    rX[i] = minus_infinity<S>();
    if (exists) rX[i] = to_sum(*advance(sX, place));
  });
  part.for_each_filled<kItems>([&](int i) { maximum = largest(maximum, rX[i]); });
  maximum = combine_lanes(maximum, part.xor_step, part.xor_limit,
                          [](S a, S b) { return largest(a, b); });
  part.for_each_filled<kItems>([&](int i) {
    rX[i] = scale.exponential(rX[i], maximum);
    sum += rX[i];
  });
  sum = combine_lanes(sum, part.xor_step, part.xor_limit, [](S a, S b) { return a + b; });
  const S inverse = S(1) / sum;
  __syncwarp();  // lanes without a line of their own have read another's
  part.for_each_item<kItems>([&](int i, int place, bool exists) {
    if (exists) *advance(sX, place) = from_sum<Element>(rX[i] * inverse);
  });
}

template <typename Config, typename S>
__device__ __forceinline__ void softmax_short_line_backward(typename Config::Element* sP,
                                                            const typename Config::Element* sGrad,
                                                            const LanePart& part,
                                                            const Scale<S>& scale) {
  using Element = typename Config::Element;
  constexpr int kItems = Config::kItems;
  S rP[kItems], rGrad[kItems];
  S sum = S(0);
  part.for_each_item<kItems>([&](int i, int place, bool exists) {
    rP[i] = rGrad[i] = S(0);
    if (exists) {
      rP[i] = to_sum(*advance(sP, place));
      rGrad[i] = to_sum(*advance(sGrad, place));
    }
  });
  part.for_each_filled<kItems>([&](int i) { sum = fma(rP[i], rGrad[i], sum); });
  sum = combine_lanes(sum, part.xor_step, part.xor_limit, [](S a, S b) { return a + b; });
  __syncwarp();  // lanes without a line of their own have read another's
  part.for_each_item<kItems>([&](int i, int place, bool exists) {
    if (exists) {
      *advance(sP, place) = from_sum<Element>(scale.exponent * rP[i] * (rGrad[i] - sum));
    }
  });
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
  auto* sX = span_shared<Config>().elems;
  const auto* sGrad = sX + buffer;
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
    LanePart part;
    part.phase = over_rows ? lane >> abreast_log2 : lane & ((1 << lanes_log2) - 1);
    part.len = lines.len;
    part.lanes_log2 = lanes_log2;
    part.xor_step = over_rows ? 1 << abreast_log2 : 1;
    part.xor_limit = over_rows ? 32 : 1 << lanes_log2;
    part.first = kBytes * (lines.first + line * (over_rows ? 1 : pitch) +
                           part.phase * (over_rows ? pitch : 1));
    part.step = kBytes * (over_rows ? pitch : 1) << lanes_log2;
    if constexpr (Config::kBackward) {
      softmax_short_line_backward<Config>(sX, sGrad, part, scale);
    } else {
      softmax_short_line<Config>(sX, part, scale);
    }
  }
}

}  // namespace jagged_cuda::softmax
