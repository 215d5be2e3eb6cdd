// jagged2_softmax: choice of the element type, and of the kernel by the matrices' mean size, which
// the host knows: the vector's elements over the number of sequences.
#include "cuda/kernels/softmax/matrix_words.cuh"
#include "cuda/kernels/softmax/over_columns.cuh"
#include "cuda/kernels/softmax/over_rows.cuh"
#include "cuda/kernels/softmax/row_words.cuh"
#include "cuda/kernels/softmax/spans.cuh"
#include "cuda/kernels/softmax/strips.cuh"

namespace jagged_cuda {
namespace {

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// `window_bytes` a power of two.
template <typename Element>
constexpr softmax::Spans spans_of(int buffer_bytes, int window_bytes) {
  constexpr int kBytes = sizeof(Element);
  // A span begins and ends anywhere in its first and last chunk.
  return {(buffer_bytes + 32) / kBytes, log2_of(window_bytes / kBytes)};
}

enum class Kernel {
  kWords,       // softmax/row_words.cuh over columns, softmax/matrix_words.cuh over rows
  kStrips,      // softmax/strips.cuh, over rows
  kWindows,     // softmax/spans.cuh, several matrices for a CTA
  kTiles,       // softmax/spans.cuh, small tiles of one matrix
  kLargeTiles,  // softmax/spans.cuh, whole matrices as far as they fit
  kRegisters,   // softmax/over_columns.cuh, softmax/over_rows.cuh
};

// Whether the kernels by words can serve: the vectors' words begin at the same elements, and the
// scale of logits is a positive number.
template <typename Element, typename Params>
bool fits_words(const Params& params) {
  using Operand = softmax::Operands<Params>;
  const auto place = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 4; };
  if (place(Operand::x(params)) != place(Operand::result(params))) return false;
  if (Operand::kBackward) return place(Operand::grad(params)) == place(Operand::result(params));
  return params.scale >= 1e-30 && params.scale <= 1e30;
}

// Elements of a mean matrix for which a cluster's registers are the fastest: smaller ones leave most of
// its threads without work, of a batch of larger ones too many do not fit.
constexpr int64_t kMinOfCluster = 12'000, kMinOfCluster32 = 6'000, kMaxOfCluster = 14'500;

// Whether strips that stay on the SM are the fastest for a batch of so many elements: backward a batch of
// matrices of 300 x 300 is slower so, and the host cannot tell it from a few large ones among small ones.
constexpr bool fits_strips(bool backward, int64_t elems, int64_t mean) {
  if (elems < 1'500'000) return false;
  if (!backward) return mean >= 40'000;
  return mean >= 200'000 || (mean >= 42'000 && elems >= 10'000'000);
}

// The fastest where they were measured (docs/performance_log.md, "jagged2_softmax"). A forward
// result does not depend on the batch: all kernels compute the same bits, and whether words fit
// follows from the operands' addresses and the scale.
template <typename Element, typename Params>
Kernel choose(const Params& params) {
  constexpr bool kIs16Bit = sizeof(Element) == 2;
  constexpr bool kBackward = softmax::Operands<Params>::kBackward;
  const int64_t num_seqs = params.matrices.rows.num_seqs, elems = params.matrices.capacity;
  const int64_t mean = elems / (num_seqs > 0 ? num_seqs : 1);
  const bool by_words = fits_words<Element>(params);
  if (by_words && !params.over_rows) return Kernel::kWords;
  // Of floats a forward sum would depend on the kernel.
  if (by_words && (kIs16Bit || kBackward) && mean >= (kIs16Bit ? kMinOfCluster : kMinOfCluster32) &&
      mean <= kMaxOfCluster && has_wgmma()) {
    return Kernel::kWords;
  }
  if (by_words && params.over_rows && (kIs16Bit || kBackward) &&
      fits_strips(kBackward, elems, mean) && has_wgmma()) {
    return Kernel::kStrips;
  }
  if (!kBackward) {
    if (!kIs16Bit) return Kernel::kRegisters;
    return mean < 800 ? Kernel::kWindows : Kernel::kTiles;
  }
  if (mean < 800) return Kernel::kWindows;
  if (params.over_rows) {
    if (mean < 8192) return Kernel::kTiles;
    return kIs16Bit && elems >= 1'000'000 ? Kernel::kLargeTiles : Kernel::kRegisters;
  }
  return mean < 2048 || mean >= 200'000 ? Kernel::kTiles : Kernel::kRegisters;
}

template <typename Element, typename Params>
cudaError_t launch_in_registers(const Params& params, cudaStream_t stream) {
  return params.over_rows ? softmax::launch_over_rows<Element>(params, stream)
                          : softmax::launch_over_columns<Element>(params, stream);
}

template <typename Element, typename Params>
cudaError_t launch_type(const Params& params, cudaStream_t stream) {
  constexpr bool kIs16Bit = sizeof(Element) == 2, kIs64Bit = sizeof(Element) == 8;
  constexpr bool kBackward = softmax::Operands<Params>::kBackward;
  // Both with the same buffer, so that they take the same way for a matrix.
  constexpr auto kWindow = spans_of<Element>(24 << 10, 8 << 10);
  constexpr auto kTile = spans_of<Element>(24 << 10, 16 << 10);
  const Kernel kernel = kIs64Bit ? Kernel::kRegisters : choose<Element>(params);
  if constexpr (!kIs64Bit) {
    if (kernel == Kernel::kWords) {
      if (!params.over_rows) return softmax::launch_row_words<Element>(params, stream);
      if constexpr (kIs16Bit || kBackward) {
        return softmax::launch_matrix_words<Element>(params, stream);
      }
    }
  }
  if constexpr (kIs16Bit || (kBackward && !kIs64Bit)) {
    switch (kernel) {
      case Kernel::kStrips:
        return softmax::launch_strips<Element>(params, stream);
      case Kernel::kWindows:
        return softmax::launch_spans<Element, true, 128>(params, kWindow, stream);
      case Kernel::kTiles:
        return softmax::launch_spans<Element, false, 128>(params, kTile, stream);
      case Kernel::kLargeTiles:
        if constexpr (kIs16Bit && kBackward) {
          constexpr auto kLargeTile = spans_of<Element>(48 << 10, 32 << 10);
          return softmax::launch_spans<Element, false, 256>(params, kLargeTile, stream);
        }
        break;
      default:
        break;
    }
  }
  if constexpr (!kIs16Bit || kBackward) return launch_in_registers<Element>(params, stream);
  return cudaErrorInvalidValue;
}

template <typename Params>
cudaError_t launch_any(const Params& params, cudaStream_t stream) {
  return with_element(params.type,
                      [&](auto element) { return launch_type<decltype(element)>(params, stream); });
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
