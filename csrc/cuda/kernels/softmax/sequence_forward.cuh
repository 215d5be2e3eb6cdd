// jagged_softmax of one sequence, as its kernels share it.
#pragma once

#include "cuda/kernels/jagged_softmax.h"
#include "cuda/kernels/softmax/sequence.cuh"
#include "cuda/kernels/softmax/words.cuh"

#include <type_traits>

namespace jagged_cuda::sequence_softmax {

using softmax::Scale;
using softmax::shift_of;
__device__ __forceinline__ double shift_of(double maximum) { return maximum + (maximum - maximum); }
// NaN if either is.
__device__ __forceinline__ float largest(float a, float b) { return ptx::max_nan(a, b); }
__device__ __forceinline__ double largest(double a, double b) { return a > b || a != a ? a : b; }

// Elements of a vector that are compared together: two of 16 bits in a word, else one.
template <typename Element, int kVector>
struct Packed {
  static constexpr bool kPairs = sizeof(Element) == 2 && kVector % 2 == 0;
  static constexpr int kCount = kPairs ? kVector / 2 : kVector;
  using Value = std::conditional_t<kPairs, uint32_t, Sum<Element>>;
  using Loaded = Vector<Element, kVector>;

  static __device__ __forceinline__ Value lowest() {
    if constexpr (kPairs) {
      return softmax::kMinusInfinities<Element>;
    } else {
      return softmax::minus_infinity<Sum<Element>>();
    }
  }
  static __device__ __forceinline__ Value largest_of(Value a, Value b) {
    if constexpr (kPairs) {
      return ptx::max_nan_x2<Element>(a, b);
    } else {
      return largest(a, b);
    }
  }
  // values = max(values, loaded), or of -loaded.
  static __device__ __forceinline__ void enlarge(Value (&values)[kCount], const Loaded& loaded,
                                                 bool negative) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kPairs) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(loaded.elems)[i];
        values[i] = largest_of(values[i], word ^ (negative ? 0x80008000u : 0));
      } else {
        const auto x = to_sum(loaded.elems[i]);
        values[i] = largest_of(values[i], negative ? -x : x);
      }
    }
  }
  static __device__ __forceinline__ Sum<Element> element(const Value (&values)[kCount], int e) {
    if constexpr (kPairs) {
      return softmax::element_of<Element>(values[e / 2], e % 2);
    } else {
      return values[e];
    }
  }
  static __device__ __forceinline__ bool is_lowest(const Value (&values)[kCount], int e) {
    return element(values, e) == softmax::minus_infinity<Sum<Element>>();
  }
  // The logit, before the scale, that an element of enlarge()'s stands for.
  static __device__ __forceinline__ Sum<Element> logit(const Value (&values)[kCount], int e,
                                                       bool negative) {
    const auto x = element(values, e);
    return negative ? -x : x;
  }
};

// One sequence as the threads of a group see it: their columns of its rows.
template <typename Element, int kVector>
struct SoftmaxView {
  using Params = JaggedSoftmaxParams;
  using Elem = Element;
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;
  static constexpr int kOperands = 1;  // read of each row

  const Element* gX;  // [len, kVector], x_stride apart
  Element* gOut;      // [len, kVector], columns apart
  int64_t x_stride;
  int64_t columns;
  int64_t len;  // 0 for a thread without columns
  Scale<S> scale;
  bool negative;  // the scale

  __device__ __forceinline__ SoftmaxView(const JaggedSoftmaxParams& params, const RowRange& range,
                                         const Place& place)
      : gX(static_cast<const Element*>(params.x) + range.begin * params.x_stride + place.column),
        gOut(static_cast<Element*>(params.out) + range.begin * params.columns + place.column),
        x_stride(params.x_stride),
        columns(params.columns),
        len(place.exists ? range.len : 0),
        scale{static_cast<S>(params.scale * (std::is_same_v<S, float> ? softmax::kLog2E : 1.0))},
        negative(params.scale < 0) {}

  __device__ __forceinline__ const Element* operand(int) const { return gX; }
  __device__ __forceinline__ int64_t stride(int) const { return x_stride; }

  __device__ __forceinline__ Loaded load(int64_t row) const {
    return *reinterpret_cast<const Loaded*>(gX + row * x_stride);
  }

  __device__ __forceinline__ void store(const S (&shift)[kVector], const S (&inverse)[kVector],
                                        const Loaded& rX, int64_t row) const {
    store(shift, inverse, rX, gOut + row * columns);
  }
  __device__ __forceinline__ void store(const S (&shift)[kVector], const S (&inverse)[kVector],
                                        const Loaded& rX, Element* gRow) const {
    Loaded result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const S p = scale.exponential(to_sum(rX.elems[e]), shift[e]) * inverse[e];
      result.elems[e] = from_sum<Element>(p);
    }
    *reinterpret_cast<Loaded*>(gRow) = result;
  }
};

// A sequence of at most kItems rows for each thread, kept in registers.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_short(const JaggedSoftmaxParams& params,
                                              const RowRange& range, const Place& place,
                                              SharedStorage& shared) {
  using S = Sum<Element>;
  using View = SoftmaxView<Element, kVector>;
  using Pairs = Packed<Element, kVector>;
  const View view(params, range, place);
  const int len = static_cast<int>(view.len), last = static_cast<int>(range.len);
  // Rows of item i, which some thread has
  const auto some = [&](int i) { return i * place.row_step < last; };
  const auto row_of = [&](int i) { return place.row + i * place.row_step; };
  typename View::Loaded rX[kItems] = {};
  typename Pairs::Value greatest[Pairs::kCount];
#pragma unroll
  for (int i = 0; i < Pairs::kCount; ++i) greatest[i] = Pairs::lowest();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) rX[i] = view.load(row_of(i));
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) Pairs::enlarge(greatest, rX[i], view.negative);
  }
  reduce_rows(greatest, place, shared, 0, Pairs::largest_of);
  S shift[kVector], sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    shift[e] = shift_of(Pairs::logit(greatest, e, view.negative));
    sum[e] = S(0);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sum[e] += view.scale.exponential(to_sum(rX[i].elems[e]), shift[e]);
      }
    }
  }
  reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = softmax::reciprocal(sum[e]);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    forget(rX[i]);
    if (some(i) && row_of(i) < len) view.store(shift, sum, rX[i], row_of(i));
  }
}

// What a thread has seen of a sequence, then what all have.
template <typename Element, int kVector>
struct SoftmaxSums {
  using View = SoftmaxView<Element, kVector>;
  using S = typename View::S;
  using Pairs = Packed<Element, kVector>;

  typename Pairs::Value greatest[Pairs::kCount];  // of enlarge()
  S shift[kVector];                               // what is taken off each logit
  S sum[kVector];                                 // of exponentials; add_up() makes it 1 / sum

  __device__ __forceinline__ SoftmaxSums() {
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) greatest[i] = Pairs::lowest();
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = S(0);
  }

  // Rows 0, step, ... below `left`: their largest logits,
  __device__ __forceinline__ void enlarge(const View& view,
                                          const typename View::Loaded (&rX)[kItems], int step,
                                          int left) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) Pairs::enlarge(greatest, rX[i], view.negative);
    }
  }
  // those of all threads,
  __device__ __forceinline__ void take_largest(const View& view, const Place& place,
                                               SharedStorage& shared) {
    reduce_rows(greatest, place, shared, 0, Pairs::largest_of);
#pragma unroll
    for (int e = 0; e < kVector; ++e) shift[e] = shift_of(Pairs::logit(greatest, e, view.negative));
  }
  // and the sums relative to these.
  __device__ __forceinline__ void add(const View& view, const typename View::Loaded (&rX)[kItems],
                                      int step, int left) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) add_column(view, rX, step, left, e);
  }

  // Likewise, but at least one row, and relative to the thread's largest logit so far.
  __device__ __forceinline__ void add_running(const View& view,
                                              const typename View::Loaded (&rX)[kItems], int step,
                                              int left) {
    typename Pairs::Value before[Pairs::kCount];
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) before[i] = greatest[i];
    enlarge(view, rX, step, left);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      // So long as all is -inf, any finite shift gives the right sum of 0, where -inf would give
      // NaN.
      shift[e] = Pairs::is_lowest(greatest, e) ? S(0) : Pairs::logit(greatest, e, view.negative);
      rescale(view, before, e);
      add_column(view, rX, step, left, e);
    }
  }

  // The largest logits of all threads, and this one's sums relative to these.
  __device__ __forceinline__ void take_largest_of_running(const View& view, const Place& place,
                                                          SharedStorage& shared) {
    typename Pairs::Value own[Pairs::kCount];
#pragma unroll
    for (int i = 0; i < Pairs::kCount; ++i) own[i] = greatest[i];
    take_largest(view, place, shared);
#pragma unroll
    for (int e = 0; e < kVector; ++e) rescale(view, own, e);
  }

  // The sums of all threads.
  __device__ __forceinline__ void add_up(const Place& place, SharedStorage& shared) {
    reduce_rows(sum, place, shared, 1, [](S a, S b) { return a + b; });
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = softmax::reciprocal(sum[e]);
  }

 private:
  __device__ __forceinline__ void add_column(const View& view,
                                             const typename View::Loaded (&rX)[kItems], int step,
                                             int left, int e) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) sum[e] += view.scale.exponential(to_sum(rX[i].elems[e]), shift[e]);
    }
  }
  // sum[e], which was relative to `before`.
  __device__ __forceinline__ void rescale(const View& view,
                                          const typename Pairs::Value (&before)[Pairs::kCount],
                                          int e) {
    if (!Pairs::is_lowest(before, e)) {
      sum[e] *= view.scale.exponential(Pairs::logit(before, e, view.negative), shift[e]);
    }
  }
};

// A longer one, read twice by the whole CTA.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_long(const JaggedSoftmaxParams& params,
                                             const RowRange& range, const Place& place,
                                             SharedStorage& shared) {
  using View = SoftmaxView<Element, kVector>;
  const View view(params, range, place);
  const int step = place.row_step;
  SoftmaxSums<Element, kVector> sums;
#pragma unroll 1
  for (int64_t first = place.row; first < view.len; first += kItems * step) {
    const int left =
        static_cast<int>(view.len - first < kItems * step ? view.len - first : kItems * step);
    typename View::Loaded rX[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * step < left) rX[i] = view.load(first + i * step);
    }
    sums.add_running(view, rX, step, left);
  }
  sums.take_largest_of_running(view, place, shared);
  sums.add_up(place, shared);
#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += step) {
    view.store(sums.shift, sums.sum, view.load(row), row);
  }
}

}  // namespace jagged_cuda::sequence_softmax
