// Which kernels jagged_flash_attention takes: wgmma or mma.sync for 16-bit elements, plain FMA for
// f32 and f64.
#include "cuda/kernels/jagged_flash_attention.h"

#include "cuda/kernels/attention/launch.h"
#include "cuda/kernels/attention/window.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"

namespace jagged_cuda {
namespace {

// Whether the wgmma kernels take these operands: head dims that they are compiled for, rows that
// can be copied in 16-byte pieces, are not expanded, and can be counted in 32 bits, and a GPU that
// has the instruction.
bool takes_wgmma(const AttentionParams& params) {
  const auto copyable = [](const HeadsView& view, int64_t rows, int64_t heads) {
    return (rows <= 1 || view.row_stride > 0) && (heads <= 1 || view.head_stride > 0);
  };
  return attention::dim_bucket(params) <= 128 && params.aligned && !params.mma_sync_only &&
         copyable(params.q, params.q_offsets.total, params.heads) &&
         copyable(params.k, params.kv_offsets.total, params.kv_heads) &&
         copyable(params.v, params.kv_offsets.total, params.kv_heads) &&
         params.q_offsets.total < kMaxRows32 && params.kv_offsets.total < kMaxRows32 && has_wgmma();
}

}  // namespace

cudaError_t launch_jagged_flash_attention(const AttentionParams& params, cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) != 2) {
      return attention::launch_forward_fma<Element>(params, stream);
    } else {
      if (takes_wgmma(params)) {
        const cudaError_t error = attention::launch_forward_wgmma<Element>(params, stream);
        if (error != cudaErrorNotSupported) return error;
      }
      return attention::launch_forward_mma_sync<Element>(params, stream);
    }
  });
}

cudaError_t launch_jagged_flash_attention_backward(const AttentionBackwardParams& params,
                                                   cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) != 2) {
      return attention::launch_backward_fma<Element>(params, stream);
    } else {
      return takes_wgmma(params) ? attention::launch_backward_wgmma<Element>(params, stream)
                                 : attention::launch_backward_mma_sync<Element>(params, stream);
    }
  });
}

}  // namespace jagged_cuda
