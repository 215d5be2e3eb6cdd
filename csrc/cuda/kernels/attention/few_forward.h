// Forward of jagged_flash_attention where there are few tiles, in one launch (few_forward.cuh).
#pragma once

#include "cuda/kernels/attention/launch.h"

namespace jagged_cuda::attention {

// 16-bit elements, head dims up to 128, operands that both kernels take, params.split_by_length: what
// launch_forward_tiny or launch_forward_tiny_wide and behind it launch_forward_wgmma do, or for head
// dims of 33 to 64, self-attention alone, launch_forward_short; bit for bit. cudaErrorNotSupported
// where an operand has no tensor map.
template <typename Element>
cudaError_t launch_forward_few(const AttentionParams& params, cudaStream_t stream);

}  // namespace jagged_cuda::attention
