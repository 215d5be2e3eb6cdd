// jagged_dense_bmm with one term per sum, in 16 bit: z_b = x_b y_b, x_b [L, 1], y_b [1, N]. The
// gradients of the products with one column are of this kind: next to nothing is read, all is written.
//
// Grid: each warp takes one virtual tile of kRows rows (prim/jagged.cuh) and walks N in steps of what
// its lanes hold, 8 columns each. As many lanes share a row as its columns take, at most all, so that
// a row leaves in whole lines. No shared memory, no barriers. A product of two 16-bit elements is
// exact in f32, so that each result is rounded once, as on tensor cores.
//
//     y_n = y_b[n : n + 8]
//     for each row:   z_b[row, n : n + 8] = x_b[row] y_n
//
// Tiles without rows return at once; rows outside every sequence become zeros; columns that do not
// exist are not loaded and not stored.
#pragma once

#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::gemm {

template <typename Element_>
struct OuterConfig {
  using Element = Element_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kRows = 64;
  static constexpr int kColumns = 8;  // of a lane
  static constexpr PathName kPath =
      PathName("cuda.jagged_dense_bmm.outer.") + kElementName<Element>;
};

// Whether a product is for this kernel: rows of z are whole 16 bytes.
inline bool is_outer(const JaggedDenseBmmParams& params) {
  constexpr int64_t kMinColumns = 32;    // with fewer most of a warp's lanes would be idle
  constexpr int64_t kMaxRows = 1 << 30;  // of the search
  const int64_t most = kMaxRows - params.offsets.num_seqs;
  return params.inner == 1 && params.columns >= kMinColumns && params.columns % 8 == 0 &&
         params.offsets.total < most && params.bias == nullptr &&
         params.activation == Activation::kNone &&
         (params.type == ElementType::kBf16 || params.type == ElementType::kF16);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads) void jagged_dense_bmm_outer(
    const __grid_constant__ JaggedDenseBmmParams params) {
  using Element = typename Config::Element;
  constexpr int kColumns = Config::kColumns;
  start_overlapping();
  const uint32_t virtual_tile = blockIdx.x * Config::kWarps + threadIdx.x / 32;
  const JaggedTile tile = find_tile_narrow<Config::kRows>(params.offsets, virtual_tile);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(tile.rows.len - tile.row, int64_t{Config::kRows}));
  const int64_t global_row = tile.rows.begin + tile.row;
  const bool inside = tile.seq >= 0;
  const int lanes = params.columns <= 8 * kColumns    ? 8
                    : params.columns <= 16 * kColumns ? 16
                                                      : 32;  // of a row
  const int lane = threadIdx.x % 32, first = lane / lanes, step = 32 / lanes;
  const Element* gX = static_cast<const Element*>(params.x) + global_row * params.x_stride;
  const int64_t stride = params.y_along_inner ? params.y_stride : 1;  // from column to column
  const Element* gY = static_cast<const Element*>(params.y) + tile.seq * params.y_seq_stride;
  Element* gOut = static_cast<Element*>(params.out) + global_row * params.columns;

  for (int64_t column = lane % lanes * kColumns; column < params.columns;
       column += lanes * kColumns) {
    float y[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      y[i] = inside ? to_sum(__ldg(gY + (column + i) * stride)) : 0.0f;
    }
#pragma unroll 4
    for (int row = first; row < rows; row += step) {
      const float x = inside ? to_sum(__ldg(gX + row * params.x_stride)) : 0.0f;
      uint32_t words[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) words[i / 2] = pack<Element>(x * y[i], x * y[i + 1]);
      ptx::st_global_16(gOut + row * params.columns + column,
                        make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

inline cudaError_t launch_outer(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const auto with = [&](auto element) {
    using Config = OuterConfig<decltype(element)>;
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, Config::kRows);
    return launch_overlapping<jagged_dense_bmm_outer<Config>>(
        params.overlaps, params, {(tiles + Config::kWarps - 1) / Config::kWarps}, Config::kThreads,
        0, stream, Config::kPath);
  };
  return params.type == ElementType::kBf16 ? with(__nv_bfloat16{}) : with(__half{});
}

}  // namespace jagged_cuda::gemm
