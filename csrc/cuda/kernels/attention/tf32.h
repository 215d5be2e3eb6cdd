// The kernels of jagged_flash_attention that multiply f32 on tensor cores: without ranges of keys,
// biases, unused keys and silu, which stay on FMA.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// kCompensated: a product in bf16 beside each in TF32, to f32's accuracy.
template <bool kCompensated>
cudaError_t launch_forward_tf32(const AttentionParams& params, cudaStream_t stream);
template <bool kCompensated>
cudaError_t launch_backward_tf32(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace jagged_cuda::attention
