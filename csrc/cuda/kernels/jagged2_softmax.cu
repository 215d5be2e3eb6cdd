// jagged2_softmax: choice of the element type, and of how the vector is cut (softmax/spans.cuh:
// mapping, shared memory, barriers).
#include "cuda/kernels/softmax/spans.cuh"

namespace jagged_cuda {
namespace {

constexpr int64_t kSmallMatrixBytes = 4096;  // on average: several share a CTA

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// `window_bytes` a power of two.
template <typename Element>
constexpr softmax::Spans spans_of(int buffer_bytes, int window_bytes) {
  constexpr int kBytes = sizeof(Element);
  // A span begins and ends anywhere in its first and last chunk.
  return {(buffer_bytes + 32) / kBytes, log2_of(window_bytes / kBytes)};
}

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  const int64_t num_seqs = params.matrices.rows.num_seqs;
  const int64_t mean_elems = params.matrices.capacity / (num_seqs > 0 ? num_seqs : 1);
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if (mean_elems * static_cast<int64_t>(sizeof(Element)) < kSmallMatrixBytes) {
      constexpr auto kSpans = spans_of<Element>(16 << 10, 8 << 10);
      return softmax::launch_spans<Element, true>(params, kSpans, stream);
    }
    constexpr auto kSpans = spans_of<Element>(48 << 10, 32 << 10);
    return softmax::launch_spans<Element, false>(params, kSpans, stream);
  });
}

}  // namespace

cudaError_t launch_jagged2_softmax(const Jagged2SoftmaxParams& params, cudaStream_t stream) {
  return launch_any(params, stream);
}

cudaError_t launch_jagged2_softmax_backward(const Jagged2SoftmaxBackwardParams& params,
                                            cudaStream_t stream) {
  return launch_any(params, stream);
}

}  // namespace jagged_cuda
