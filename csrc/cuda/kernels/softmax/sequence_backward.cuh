// jagged_softmax's gradients of one sequence, as its kernels share them.
#pragma once

#include "cuda/kernels/jagged_softmax.h"
#include "cuda/kernels/softmax/sequence.cuh"

namespace jagged_cuda::sequence_softmax {

template <typename Element, int kVector>
struct SoftmaxBackwardView {
  using Params = JaggedSoftmaxBackwardParams;
  using Elem = Element;
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;
  static constexpr int kOperands = 2;  // read of each row: grad_out and p

  const Element* gGrad;  // [len, kVector], grad_stride apart
  const Element* gP;     // [len, kVector], p_stride apart
  Element* gGradX;       // [len, kVector], columns apart
  int64_t grad_stride;
  int64_t p_stride;
  int64_t columns;
  int64_t len;  // 0 for a thread without columns
  S scale;

  __device__ __forceinline__ SoftmaxBackwardView(const JaggedSoftmaxBackwardParams& params,
                                                 const RowRange& range, const Place& place)
      : gGrad(static_cast<const Element*>(params.grad_out) + range.begin * params.grad_out_stride +
              place.column),
        gP(static_cast<const Element*>(params.out) + range.begin * params.out_stride +
           place.column),
        gGradX(static_cast<Element*>(params.grad_x) + range.begin * params.columns + place.column),
        grad_stride(params.grad_out_stride),
        p_stride(params.out_stride),
        columns(params.columns),
        len(place.exists ? range.len : 0),
        scale(static_cast<S>(params.scale)) {}

  __device__ __forceinline__ const Element* operand(int k) const { return k == 0 ? gGrad : gP; }
  __device__ __forceinline__ int64_t stride(int k) const { return k == 0 ? grad_stride : p_stride; }

  __device__ __forceinline__ void load(Loaded& rGrad, Loaded& rP, int64_t row) const {
    rGrad = *reinterpret_cast<const Loaded*>(gGrad + row * grad_stride);
    rP = *reinterpret_cast<const Loaded*>(gP + row * p_stride);
  }

  // sum += grad * p
  static __device__ __forceinline__ void add(S (&sum)[kVector], const Loaded& rGrad,
                                             const Loaded& rP) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      sum[e] = fma(to_sum(rGrad.elems[e]), to_sum(rP.elems[e]), sum[e]);
    }
  }

  __device__ __forceinline__ void store(const S (&sum)[kVector], const Loaded& rGrad,
                                        const Loaded& rP, int64_t row) const {
    Loaded result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      result.elems[e] =
          from_sum<Element>(scale * to_sum(rP.elems[e]) * (to_sum(rGrad.elems[e]) - sum[e]));
    }
    *reinterpret_cast<Loaded*>(gGradX + row * columns) = result;
  }
};

// A sequence of at most kItems rows for each thread, kept in registers.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_short(const JaggedSoftmaxBackwardParams& params,
                                              const RowRange& range, const Place& place,
                                              SharedStorage& shared) {
  using View = SoftmaxBackwardView<Element, kVector>;
  using S = Sum<Element>;
  const View view(params, range, place);
  const int len = static_cast<int>(view.len), last = static_cast<int>(range.len);
  // Rows of item i, which some thread has
  const auto some = [&](int i) { return i * place.row_step < last; };
  const auto row_of = [&](int i) { return place.row + i * place.row_step; };
  typename View::Loaded rGrad[kItems] = {}, rP[kItems] = {};
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) view.load(rGrad[i], rP[i], row_of(i));
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) View::add(sum, rGrad[i], rP[i]);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
  // So that what they are as floats is not kept
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    forget(rGrad[i]);
    forget(rP[i]);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (some(i) && row_of(i) < len) view.store(sum, rGrad[i], rP[i], row_of(i));
  }
  if (place.in_cta) __syncthreads();  // one reduction per sequence: its buffer is used again
}

// A longer one, read twice by the whole CTA.
template <typename Element, int kVector>
__device__ __forceinline__ void softmax_long(const JaggedSoftmaxBackwardParams& params,
                                             const RowRange& range, const Place& place,
                                             SharedStorage& shared) {
  using View = SoftmaxBackwardView<Element, kVector>;
  using S = Sum<Element>;
  const View view(params, range, place);
  S sum[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum[e] = S(0);
#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    View::add(sum, rGrad, rP);
  }
  reduce_rows(sum, place, shared, 0, [](S a, S b) { return a + b; });
#pragma unroll 4
  for (int64_t row = place.row; row < view.len; row += place.row_step) {
    typename View::Loaded rGrad, rP;
    view.load(rGrad, rP, row);
    view.store(sum, rGrad, rP, row);
  }
  __syncthreads();
}

}  // namespace jagged_cuda::sequence_softmax
