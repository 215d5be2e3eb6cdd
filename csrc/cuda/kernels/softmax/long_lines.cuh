// Lines that all warps of a CTA share, of any length, in shared or global memory: read twice. The
// first time a thread keeps a running maximum and sum (backward: the sum of p dp) of its part, which
// are then combined; the second time it writes the results.
//
// Forward, lines of 16-bit elements of up to kMaxCountedTerms are read three times: their maximum is known
// before exponentials are added, as integers, so that they have the same bits as in other kernels.
//
// 2^lanes_log2 lanes of each warp share a line, so that 2^(5 - lanes_log2) lines are computed
// abreast. What is added in which order depends on the matrix's shape alone.
//
// Barriers: the partials of all warps are there; the results are there, and all have read the
// partials.
#pragma once

#include "cuda/kernels/softmax/short_lines.cuh"

namespace jagged_cuda::softmax {

template <typename S>
__device__ __forceinline__ void combine(Partial<S, true>& own, const Partial<S, true>& other,
                                        const Scale<S>&) {
  own.sum += other.sum;
}
template <typename S>
__device__ __forceinline__ void combine(Partial<S, false>& own, const Partial<S, false>& other,
                                        const Scale<S>& scale) {
  const S greatest = largest(own.maximum, other.maximum), shift = finite(greatest);
  own.sum =
      scale.rescaled(own.sum, own.maximum, shift) + scale.rescaled(other.sum, other.maximum, shift);
  own.maximum = greatest;
}

template <typename S>
__device__ __forceinline__ Partial<S, true> of_lane(const Partial<S, true>& own, int step) {
  return {__shfl_xor_sync(kAllLanes, own.sum, step)};
}
template <typename S>
__device__ __forceinline__ Partial<S, false> of_lane(const Partial<S, false>& own, int step) {
  return {__shfl_xor_sync(kAllLanes, own.sum, step), __shfl_xor_sync(kAllLanes, own.maximum, step)};
}

// Where lines lie. In shared memory the result replaces x; in global memory x is yet to be
// multiplied by `sign`.
template <typename Element, typename Index_>
struct Place {
  using Index = Index_;
  const Element* x;
  const Element* grad;
  Element* out;
  Sum<Element> sign;
};

// A thread's part of a line: elements phase, phase + phases, ... of `len`.
template <typename Index>
struct ThreadPart {
  Index first, step;  // in elements of memory
  Index phase, phases, len;

  // Calls visit(places), several at a time.
  template <typename Visit>
  __device__ __forceinline__ void for_each_item(Visit visit) const {
    constexpr int kItems = 4;
    Index i = phase, place = first;
    const Index last = len - (kItems - 1) * phases;
#pragma unroll 1
    for (; i < last; i += kItems * phases) {
      Index places[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item, place += step) places[item] = place;
      visit(places);
    }
#pragma unroll 1
    for (; i < len; i += phases, place += step) {
      const Index places[1] = {place};
      visit(places);
    }
  }
};

// What a thread's part of a line adds up to.
template <bool kBackward, typename S, typename Place, typename Part>
__device__ __forceinline__ Partial<S, kBackward> partial_of(const Place& place, const Part& part,
                                                            const Scale<S>& scale) {
  Partial<S, kBackward> own;
  part.for_each_item([&](auto& places) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(places)>>;
    S rX[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) rX[i] = place.sign * to_sum(place.x[places[i]]);
    if constexpr (kBackward) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        own.sum = fma(rX[i], to_sum(place.grad[places[i]]), own.sum);
      }
    } else {
      S greatest = own.maximum;
#pragma unroll
      for (int i = 0; i < kItems; ++i) greatest = largest(greatest, rX[i]);
      const S shift = finite(greatest);
      own.sum = scale.rescaled(own.sum, own.maximum, shift);
#pragma unroll
      for (int i = 0; i < kItems; ++i) own.sum += scale.exponential(rX[i], shift);
      own.maximum = greatest;
    }
  });
  return own;
}

// `shift` is the line's maximum, `inverse` that of its sum; backward `shift` is the sum.
template <bool kBackward, typename Element, typename S, typename Place, typename Part>
__device__ __forceinline__ void finish_part(const Place& place, const Part& part, S shift,
                                            S inverse, const Scale<S>& scale) {
  part.for_each_item([&](auto& places) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(places)>>;
    S rX[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rX[i] = place.sign * to_sum(place.x[places[i]]);
      if constexpr (kBackward) {
        rX[i] *= scale.exponent * (to_sum(place.grad[places[i]]) - shift);
      } else {
        rX[i] = scale.exponential(rX[i], shift) * inverse;
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) place.out[places[i]] = from_sum<Element>(rX[i]);
  });
}

// The largest element of a thread's part of a line.
template <typename S, typename Place, typename Part>
__device__ __forceinline__ S largest_of(const Place& place, const Part& part) {
  S greatest = minus_infinity<S>();
  part.for_each_item([&](auto& places) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(places)>>;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      greatest = ptx::max_nan(greatest, place.sign * to_sum(place.x[places[i]]));
    }
  });
  return greatest;
}

// The exponentials of a thread's part of a line, in multiples of 2^-22.
template <typename Element, typename S, typename Place, typename Part>
__device__ __forceinline__ unsigned long long count_exponentials(const Place& place,
                                                                 const Part& part, S shift,
                                                                 const Scale<S>& scale) {
  unsigned long long all = 0;
  part.for_each_item([&](auto& places) {
    constexpr int kItems = std::extent_v<std::remove_reference_t<decltype(places)>>;
    S rX[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) rX[i] = place.sign * to_sum(place.x[places[i]]);
    SumOfExponentials<Element> sum;
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum.add(scale.exponential(rX[i], shift));
    all += sum.value - (static_cast<uint32_t>(kItems) << 30);
  });
  return all;
}

// `count` lines, `line_step` elements apart, of `len` elements `elem_step` apart, from `first` on. All
// threads of the CTA call it together.
template <typename Config, typename Place, typename S>
__device__ __noinline__ void softmax_long_lines(Place place, bool over_rows,
                                                typename Place::Index first, int count,
                                                typename Place::Index len,
                                                typename Place::Index line_step,
                                                typename Place::Index elem_step, int lanes_log2,
                                                Scale<S> scale) {
  using Index = typename Place::Index;
  using Element = typename Config::Element;
  auto* sPartials = span_shared<Config>().partials;
  constexpr int kWarps = Config::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int abreast_log2 = 5 - lanes_log2, abreast = 1 << abreast_log2;
  // Beside each other in a warp are columns.
  const int own_line = over_rows ? lane & (abreast - 1) : lane >> lanes_log2;
  const int own_phase = over_rows ? lane >> abreast_log2 : lane & ((1 << lanes_log2) - 1);
  const int xor_step = over_rows ? abreast : 1, xor_limit = over_rows ? 32 : 1 << lanes_log2;
  ThreadPart<Index> part;
  part.phase = static_cast<Index>((warp << lanes_log2) + own_phase);
  part.phases = static_cast<Index>(kWarps << lanes_log2);
  part.step = part.phases * elem_step;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += abreast) {
    const int line = begin + own_line;
    part.first = first + line * line_step + part.phase * elem_step;
    part.len = line < count ? len : 0;
    if constexpr (!Config::kBackward && sizeof(Element) == 2) {
      if (len <= kMaxCountedTerms) {
        using Count = unsigned long long;
        static_assert(sizeof(Count) == sizeof(sPartials[0]));
        auto* sCounts = reinterpret_cast<Count*>(sPartials);
        const auto larger = [](S a, S b) { return ptx::max_nan(a, b); };
        const auto sum_of = [](Count a, Count b) { return a + b; };
        S maximum = combine_lanes(largest_of<S>(place, part), xor_step, xor_limit, larger);
        if (own_phase == 0) sPartials[warp * 32 + own_line].maximum = maximum;
        __syncthreads();  // the maxima of all warps are there
        maximum = sPartials[own_line].maximum;
#pragma unroll 1
        for (int w = 1; w < kWarps; ++w) {
          maximum = larger(maximum, sPartials[w * 32 + own_line].maximum);
        }
        maximum = shift_of(maximum);
        Count all = combine_lanes(count_exponentials<Element>(place, part, maximum, scale),
                                  xor_step, xor_limit, sum_of);
        __syncthreads();  // all have read the maxima
        if (own_phase == 0) sCounts[warp * 32 + own_line] = all;
        __syncthreads();  // the sums of all warps are there
        all = sCounts[own_line];
#pragma unroll 1
        for (int w = 1; w < kWarps; ++w) all += sCounts[w * 32 + own_line];
        finish_part<false, Element>(place, part, maximum, reciprocal_of_count(all), scale);
        __syncthreads();  // the results are there, and all have read the sums
        continue;
      }
    }
    Partial<S, Config::kBackward> own = partial_of<Config::kBackward>(place, part, scale);
#pragma unroll 1
    for (int step = xor_step; step < xor_limit; step *= 2) combine(own, of_lane(own, step), scale);
    if (own_phase == 0) sPartials[warp * 32 + own_line] = own;
    __syncthreads();  // the partials of all warps are there
    own = sPartials[own_line];
#pragma unroll 1
    for (int w = 1; w < kWarps; ++w) combine(own, sPartials[w * 32 + own_line], scale);
    if constexpr (Config::kBackward) {
      finish_part<true, Element>(place, part, own.sum, S(1), scale);
    } else {
      // The maximum of a line of -inf makes it NaN, as in torch.
      finish_part<false, Element>(place, part, own.maximum, S(1) / own.sum, scale);
    }
    __syncthreads();  // the results are there, and all have read the partials
  }
}

}  // namespace jagged_cuda::softmax
