// One function a path and element type, each in a file of its own so that they compile in parallel.
// All launch for every head dim up to 256 and return the launch error.
#pragma once

#include "cuda/kernels/jagged_flash_attention.h"

namespace jagged_cuda::attention {

// Head dims that kernels are compiled for; D and Dv are rounded up to the next.
constexpr int kDims[] = {32, 64, 128, 256};

inline int dim_bucket(const AttentionParams& params) {
  const int dim = params.dim_qk > params.dim_v ? params.dim_qk : params.dim_v;
  for (int bucket : kDims) {
    if (dim <= bucket) return bucket;
  }
  return 0;
}

// True where sequences are long on average, which is all that the host knows of their lengths. Then
// the mma.sync kernels give a warp two blocks of 16 rows (tiles of 128 rows, then seldom half
// empty), and the wgmma backward kernels take larger steps. Larger head dims leave fewer registers,
// and gain later.
inline bool has_long_sequences(const AttentionParams& params) {
  const int64_t long_rows = dim_bucket(params) <= 64 ? 192 : 768;
  return params.q_offsets.total >= long_rows * params.q_offsets.num_seqs;
}

// Whether the wgmma kernels take these operands: the two head dims that they are compiled for, rows
// that can be copied in 16-byte pieces, are not expanded, and can be counted in 32 bits, and a GPU
// that has the instruction.
bool takes_wgmma(const AttentionParams& params);

// Whether the kernels for tiny sequences take these operands, so that the others leave them such
// sequences: head dims of at most 64, rows in 16-byte pieces, and all that they count in 32 bits.
bool takes_tiny(const AttentionParams& params);
// Whether no sequence can be longer, by the caller's word or by the size of the tensors.
bool all_tiny(const AttentionParams& params);

cudaError_t forward_tiny_f16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_tiny_bf16(const AttentionParams& params, cudaStream_t stream);
cudaError_t backward_tiny_f16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_tiny_bf16(const AttentionBackwardParams& params, cudaStream_t stream);

cudaError_t forward_wgmma_f16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_wgmma_bf16(const AttentionParams& params, cudaStream_t stream);
cudaError_t backward_wgmma_f16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_wgmma_bf16(const AttentionBackwardParams& params, cudaStream_t stream);

cudaError_t forward_mma_sync_f16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_mma_sync_bf16(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_simt_f32(const AttentionParams& params, cudaStream_t stream);
cudaError_t forward_simt_f64(const AttentionParams& params, cudaStream_t stream);

cudaError_t backward_mma_sync_f16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_mma_sync_bf16(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_simt_f32(const AttentionBackwardParams& params, cudaStream_t stream);
cudaError_t backward_simt_f64(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace jagged_cuda::attention
