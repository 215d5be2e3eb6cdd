// Operands and tiles of the backward kernels on wgmma and TMA.
#pragma once

#include "cuda/kernels/attention/launch.cuh"
#include "cuda/kernels/attention/tiles.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"

namespace jagged_cuda::attention {

// The parameters of a kernel that copies Q, dO, K and V by TMA.
struct BackwardOperands {
  CUtensorMap q;         // [Tq, H, D], boxes of QueryRows::kRows rows of one head
  CUtensorMap grad_out;  // [Tq, H, Dv], likewise
  CUtensorMap k;         // [Tk, G, D], boxes of KeyRows::kRows rows of one head
  CUtensorMap v;         // [Tk, G, Dv], likewise
  AttentionBackwardParams attention;

  // The maps, from `attention`; cudaErrorNotSupported where a tensor has none.
  template <typename QueryRows, typename KeyRows>
  cudaError_t encode() {
    const int64_t queries = attention.q_offsets.total, keys = attention.kv_offsets.total;
    const cudaError_t errors[] = {
        encode_heads<QueryRows>(q, attention, attention.q, queries, attention.heads,
                                attention.dim_qk),
        encode_heads<QueryRows>(grad_out, attention, attention.grad_out, queries, attention.heads,
                                attention.dim_v),
        encode_heads<KeyRows>(k, attention, attention.k, keys, attention.kv_heads,
                              attention.dim_qk),
        encode_heads<KeyRows>(v, attention, attention.v, keys, attention.kv_heads,
                              attention.dim_v)};
    for (cudaError_t error : errors) {
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
};

// The SMs of the current device.
inline cudaError_t count_sms(int& num_sms) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
}

// The window of a sequence with `diagonal` more keys than queries: rows are queries, columns keys.
__device__ __forceinline__ WindowOf<int> sequence_window(const AttentionParams& params,
                                                         int diagonal) {
  return {diagonal, window_rows32(params.window_left), window_rows32(params.window_right)};
}

// Copies the same rows of two operands, Q and dO or K and V, for whose bytes `full` waits, and for
// `more` bytes that other copies bring; one thread.
template <typename Tile>
__device__ __forceinline__ void copy_pair(Tile& a, const CUtensorMap& a_map, Tile& b,
                                          const CUtensorMap& b_map, int64_t row, int head,
                                          uint64_t& full, int more = 0) {
  ptx::mbarrier_arrive_expect_tx(full, 2 * static_cast<int>(sizeof(a.data)) + more);
  copy_expected_tile(a, a_map, row, head, full);
  copy_expected_tile(b, b_map, row, head, full);
}

// Starts s = a b^T and then dp = c d^T, each in a group of its own, for 64 rows, behind a
// wgmma_fence: S = Q K^T and dP = dO V^T, or S^T = K Q^T and dP^T = V dO^T. kUniform: descriptor_of().
template <bool kUniform = false, int kBlocks, typename RowTile, typename ColumnTile>
__device__ __forceinline__ void start_scores_and_grad_probs(Accumulator<1, kBlocks>& s,
                                                            const RowTile& a, const ColumnTile& b,
                                                            Accumulator<1, kBlocks>& dp,
                                                            const RowTile& c, const ColumnTile& d) {
  wgmma_rows_by_rows<0, kUniform>(s, a, 0, b);
  ptx::wgmma_commit_group();
  wgmma_rows_by_rows<0, kUniform>(dp, c, 0, d);
  ptx::wgmma_commit_group();
}

// Of one value per column, in shared memory, those of the two columns that a lane has in a block of
// an accumulator.
__device__ __forceinline__ float2 columns_of_lane(const float* values, int block, int lane) {
  return *reinterpret_cast<const float2*>(values + block * 8 + 2 * (lane % 4));
}

// o = a^T b over the rows of two tiles, for 64 columns of a and kBlocks * 8 of b from the places on
// that the descriptors name. kAdds: o += a^T b.
template <typename ATile, typename BTile, bool kAdds = false, int kBlocks>
__device__ __forceinline__ void wgmma_columns_by_columns(Accumulator<1, kBlocks>& o,
                                                         const ptx::MatrixDescriptor& a,
                                                         const ptx::MatrixDescriptor& b) {
  using Product = ptx::Wgmma<typename ATile::Element, true, true>;
  static_assert(ATile::kRows == BTile::kRows);
#pragma unroll
  for (int k = 0; k < ATile::kRows; k += 16)
    Product::run(o[0], a + ATile::row_step_bytes(k), b + BTile::row_step_bytes(k), kAdds || k > 0);
}

}  // namespace jagged_cuda::attention
