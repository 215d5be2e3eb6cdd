// jagged_dense_bmm with 8 columns, or fewer if y_b has stride 1 along D, in 16 bit: z_b = x_b y_b, x_b
// [L, D] with stride 1 along D, y_b [D, N] with stride 1 along either, D = 64, 128 or 256. Much is read,
// little written: what counts is that loads of x start at once.
//
// Grid: each warp takes `tiles` times 16 rows, wherever sequences begin. It starts the loads of 16 rows,
// and finds their sequences (prim/narrow_search.cuh) and loads y_b meanwhile.
//
//     for 16 rows:   rX = x[rows, :]
//                    for each sequence b among them:
//                        rY = y_b, unless it is there;   z[rows of b] = (rX rY)[rows of b]
//
// x goes from global memory to registers, 16 bytes in each load. Which terms of a sum are multiplied
// together is free: lane t of a quad has terms 8 t to 8 t + 7 of 32, of which two products take pairs in
// order where mma has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. At D = 256 (kInOrder) the sums are those of the
// engine (engine.cuh), which is faster where sequences are longer: the products take terms 0 to 15 and 16
// to 31, for which the halves of a quad exchange pairs, and each 64 terms are summed from zero.
//
// Shared memory: y_b for each warp, if it has stride 1 along N; ldmatrix transposes it. Terms 8 a + 2 m + i
// of 32 lie at place 8 m + 2 a + i, so that the rows of one matrix lie beside each other; kInOrder as
// exchange() has them. __syncwarp.
//
// Rows outside every sequence become zeros; rows that do not exist are not loaded and not stored.
#pragma once

#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {

template <typename Element_, int kInner_, bool kAlongInner_>
struct FewColumnsConfig {
  using Element = Element_;
  static constexpr int kInner = kInner_;
  static constexpr bool kAlongInner = kAlongInner_;
  static constexpr int kColumns = 8;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kChunks = kInner / 32;  // of 32 terms
  static constexpr bool kInOrder = kInner == 256;
  static constexpr int kMinCtas = kInner == 256 ? 4 : 6;
  static constexpr PathName kPath =
      PathName("cuda.jagged_dense_bmm.few_columns.") + kElementName<Element>;
};

template <typename Config>
struct FewColumnsStorage {
  static constexpr int kPlaces = Config::kAlongInner ? 1 : Config::kInner;
  uint4 sY[Config::kWarps][kPlaces];
};

struct FewColumnsParams {
  JaggedDenseBmmParams product;
  int tiles;  // of 16 rows, for each warp
};

inline bool is_few_columns(const JaggedDenseBmmParams& params) {
  constexpr int64_t kMaxRows = int64_t{1} << 30;
  return (params.columns == 8 || (params.columns < 8 && params.y_along_inner)) &&
         (params.inner == 64 || params.inner == 128 || params.inner == 256) && params.x_vectors &&
         params.y_vectors && params.bias == nullptr && params.activation == Activation::kNone &&
         params.offsets.total < kMaxRows && params.offsets.num_seqs < kMaxRows &&
         (params.type == ElementType::kBf16 || params.type == ElementType::kF16);
}

// Pairs of terms 8 t to 8 t + 7 of 32 become: first two of terms 0 to 15, then two of 16 to 31.
__device__ __forceinline__ uint4 exchange(const uint4& pairs) {
  const bool is_low = threadIdx.x % 4 < 2;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, is_low ? pairs.z : pairs.x, 2),
                 second = __shfl_xor_sync(0xffffffffu, is_low ? pairs.w : pairs.y, 2);
  return is_low ? make_uint4(pairs.x, pairs.y, first, second)
                : make_uint4(first, second, pairs.z, pairs.w);
}

// This lane's terms of y_b: registers 2 i and 2 i + 1 of those of product i.
template <typename Config>
__device__ __forceinline__ void load_y(uint32_t (&rY)[Config::kChunks][4],
                                       uint4 (&sY)[FewColumnsStorage<Config>::kPlaces],
                                       const typename Config::Element* gY, int64_t stride,
                                       int columns) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kAlongInner) {
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      uint4 words = ptx::ld_global_nc_16(gY + lane / 4 * stride + chunk * 32 + lane % 4 * 8,
                                         lane / 4 < columns);
      if constexpr (Config::kInOrder) words = exchange(words);
      rY[chunk][0] = words.x, rY[chunk][1] = words.y, rY[chunk][2] = words.z,
      rY[chunk][3] = words.w;
    }
  } else {
    uint4 words[Config::kChunks];
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      words[chunk] = __ldg(reinterpret_cast<const uint4*>(gY + (chunk * 32 + lane) * stride));
    }
    const int a = lane / 8, m = lane % 8 / 2;
    const int place = Config::kInOrder
                          ? (a / 2 * 2 + m % 2) * 8 + (a % 2 + m / 2 * 2) * 2 + lane % 2
                          : m * 8 + a * 2 + lane % 2;
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) sY[chunk * 32 + place] = words[chunk];
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      ptx::ldmatrix_x4_trans(rY[chunk], &sY[chunk * 32 + lane]);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_dense_bmm_few_columns(
    const __grid_constant__ FewColumnsParams launch) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kChunks;
  const JaggedDenseBmmParams& params = launch.product;
  const int tiles = launch.tiles;
  start_overlapping();
  const int columns = static_cast<int>(params.columns);
  __shared__ FewColumnsStorage<Config> shared;
  const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  const uint32_t total = static_cast<uint32_t>(params.offsets.total);
  const uint32_t first = (blockIdx.x * Config::kWarps + threadIdx.x / 32) * 16 * tiles;
  if (first >= total) return;
  const Element* gX = static_cast<const Element*>(params.x) + quad_lane * 8;
  Element* gOut = static_cast<Element*>(params.out) + quad_lane * 2;

  uint4 rX[kChunks][2];
  const auto load_x = [&](uint32_t tile_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = tile_row + quad + 8 * half;
      const Element* gRow = gX + row * params.x_stride;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        rX[chunk][half] = ptx::ld_global_nc_16(gRow + chunk * 32, row < total);
      }
    }
  };
  load_x(first);
  RowOwner owner(params.offsets, first);
  uint32_t rY[kChunks][4];
  uint32_t loaded = ~0u;  // the sequence whose y is there
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t tile_row = first + tile * 16, tile_end = min(tile_row + 16, total);
    if (tile_row >= total) break;
    float sums[2][4];
    uint32_t row = tile_row;
    for (;;) {
      // Wrong offsets may give an end that is none.
      const bool is_right = owner.end() > row;
      const uint32_t end = is_right ? min(owner.end(), tile_end) : tile_end;
      const bool inside = is_right && owner.is_sequence();
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][i] = sums[1][i] = 0.0f;
      if (inside) {
        if (owner.seq() != loaded) {
          loaded = owner.seq();
          load_y<Config>(rY, shared.sY[threadIdx.x / 32],
                         static_cast<const Element*>(params.y) + loaded * params.y_seq_stride,
                         params.y_stride, columns);
        }
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          uint4 upper = rX[chunk][0], lower = rX[chunk][1];
          if constexpr (Config::kInOrder) {
            upper = exchange(upper);
            lower = exchange(lower);
          }
          const uint32_t low[4] = {upper.x, lower.x, upper.y, lower.y},
                         high[4] = {upper.z, lower.z, upper.w, lower.w};
          ptx::mma_m16n8k16<Element>(sums[0], low, rY[chunk][0], rY[chunk][1]);
          float (&second)[4] = sums[Config::kInOrder ? 0 : 1];
          ptx::mma_m16n8k16<Element>(second, high, rY[chunk][2], rY[chunk][3]);
          if (Config::kInOrder && chunk % 2 == 1) {  // 64 terms
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[1][i] += sums[0][i];
              sums[0][i] = 0.0f;
            }
          }
        }
      }
      const bool is_last = end == tile_end;
      if (is_last && tile + 1 < tiles) load_x(tile_row + 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t own = tile_row + quad + 8 * half;
        if (own < row || own >= end) continue;
        const float low = sums[0][2 * half] + sums[1][2 * half],
                    high = sums[0][2 * half + 1] + sums[1][2 * half + 1];
        Element* gPair = gOut + own * params.columns;
        if (columns == Config::kColumns) {
          *reinterpret_cast<uint32_t*>(gPair) = pack<Element>(low, high);
        } else {
          if (quad_lane * 2 < columns) gPair[0] = from_sum<Element>(low);
          if (quad_lane * 2 + 1 < columns) gPair[1] = from_sum<Element>(high);
        }
      }
      row = end;
      if (is_last && (tile + 1 == tiles || owner.end() > row)) break;
      if (row < total) owner.advance(row);
      if (is_last) break;
    }
  }
}

// As many rows for each warp as let most of them run at once, up to kMostTiles.
inline int few_columns_tiles(int64_t rows) {
  constexpr int64_t kRowsAtOnce = 132 * 16 * 16;  // of an H100 with 16 warps per SM
  constexpr int64_t kMostTiles = 4;
  return static_cast<int>(min((rows + kRowsAtOnce - 1) / kRowsAtOnce + (rows == 0), kMostTiles));
}

template <typename Config>
cudaError_t launch_few_columns(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const int64_t rows = params.offsets.total;
  const int tiles = few_columns_tiles(rows), rows_each = Config::kWarps * 16 * tiles;
  return launch_overlapping<jagged_dense_bmm_few_columns<Config>>(
      params.overlaps, FewColumnsParams{params, tiles}, {rows / rows_each + 1}, Config::kThreads, 0,
      stream, Config::kPath);
}

inline cudaError_t launch_few_columns(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const auto with_layout = [&](auto element, auto inner) {
    using Element = decltype(element);
    constexpr int kInner = decltype(inner)::value;
    return params.y_along_inner
               ? launch_few_columns<FewColumnsConfig<Element, kInner, true>>(params, stream)
               : launch_few_columns<FewColumnsConfig<Element, kInner, false>>(params, stream);
  };
  const auto with_inner = [&](auto element) {
    switch (params.inner) {
      case 64:
        return with_layout(element, std::integral_constant<int, 64>{});
      case 128:
        return with_layout(element, std::integral_constant<int, 128>{});
      default:
        return with_layout(element, std::integral_constant<int, 256>{});
    }
  };
  return params.type == ElementType::kBf16 ? with_inner(__nv_bfloat16{}) : with_inner(__half{});
}

}  // namespace jagged_cuda::gemm
