// jagged_dense_bmm with 8 or 16 terms per sum, in 16 bit: z_b = x_b y_b, x_b [L, D] with stride 1
// along D, y_b [D, N] with stride 1 along either. The gradients of the products with few columns are
// of this kind: little is read, much written.
//
// Grid: each warp takes one virtual tile of kRows rows (prim/jagged.cuh) and walks N in steps of
// kColumns. y_b's part stays in registers while the tile's rows pass, 16 at a time, straight from
// global memory, the next 16 loaded meanwhile: neither shared memory nor barriers.
//
//     rB = y_b[:, n : n + kColumns]
//     for 16 rows:   rA = x_b[rows, :];   z_b[rows, n : n + kColumns] = rA rB
//
// Which column of a product is which column of z is free: block j of four holds columns 8 t + 2 j + i
// of 32 where mma has 2 t + i. So the lane that has the sums of columns 2 t and 2 t + 1 of all four
// blocks has 8 columns of z in a row, 16 bytes.
//
// Tiles without rows return at once; rows outside every sequence become zeros; rows and columns that
// do not exist are not loaded and not stored.
#pragma once

#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {

// kInner: 8 or 16 terms; kAlongInner: y has stride 1 along D.
template <typename Element_, int kInner_, bool kAlongInner_>
struct ThinConfig {
  using Element = Element_;
  static constexpr int kInner = kInner_;
  static constexpr bool kAlongInner = kAlongInner_;
  static_assert(kInner == 8 || kInner == 16);
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kRows = 64;  // more: fewer searches, and loads of y; less: fewer warps
  static constexpr int kPairs = kInner / 8;    // registers of a column's terms
  static constexpr int kBlocks = 32 / kPairs;  // of 8 columns: 32 registers of y
  static constexpr int kColumns = kBlocks * 8;
  static constexpr PathName kPath = PathName("cuda.jagged_dense_bmm.thin.") + kElementName<Element>;
};

// Whether a product is for this kernel: lines of x and y are whole 16 bytes, as are those of z.
inline bool is_thin(const JaggedDenseBmmParams& params) {
  constexpr int64_t kMinColumns = 64;    // with fewer most of a warp's columns would not exist
  constexpr int64_t kMaxRows = 1 << 30;  // of the search
  const int64_t most = kMaxRows - params.offsets.num_seqs;
  return (params.inner == 8 || params.inner == 16) && params.offsets.total < most &&
         params.columns >= kMinColumns && params.columns % 8 == 0 && params.x_vectors &&
         params.y_vectors && params.bias == nullptr && params.activation == Activation::kNone &&
         (params.type == ElementType::kBf16 || params.type == ElementType::kF16);
}

// Two terms beside each other, and two that are 8 further; zeros where the line does not exist.
template <typename Element, int kPairs>
__device__ __forceinline__ void load_terms(uint32_t (&terms)[kPairs], const Element* line,
                                           bool exists) {
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    terms[pair] = exists ? __ldg(reinterpret_cast<const uint32_t*>(line + pair * 8)) : 0;
  }
}

// The same with `stride` elements between terms.
template <typename Element, int kPairs>
__device__ __forceinline__ void load_terms(uint32_t (&terms)[kPairs], const Element* line,
                                           int64_t stride, bool exists) {
  const unsigned short* first = reinterpret_cast<const unsigned short*>(line);
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const uint32_t low = exists ? __ldg(first + pair * 8 * stride) : 0,
                   high = exists ? __ldg(first + (pair * 8 + 1) * stride) : 0;
    terms[pair] = low | high << 16;
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 5) void jagged_dense_bmm_thin(
    const __grid_constant__ JaggedDenseBmmParams params) {
  using Element = typename Config::Element;
  constexpr int kPairs = Config::kPairs, kBlocks = Config::kBlocks;
  start_overlapping();
  const int lane = threadIdx.x % 32, quad_lane = lane % 4, quad = lane / 4;
  const uint32_t virtual_tile = blockIdx.x * Config::kWarps + threadIdx.x / 32;
  const JaggedTile tile = find_tile_narrow<Config::kRows>(params.offsets, virtual_tile);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row, global_row = tile.rows.begin + tile.row;
  const int rows = static_cast<int>(left < Config::kRows ? left : Config::kRows);
  const bool inside = tile.seq >= 0;
  // This lane's terms of a line: 2 (lane % 4) and the next, and 8 behind those.
  const Element* gX = static_cast<const Element*>(params.x) + global_row * params.x_stride;
  const Element* gY = static_cast<const Element*>(params.y) + tile.seq * params.y_seq_stride;
  gX += quad_lane * 2, gY += quad_lane * 2 * (Config::kAlongInner ? 1 : params.y_stride);
  Element* gOut = static_cast<Element*>(params.out) + global_row * params.columns;

  // Of the 16 rows that come next.
  uint32_t rUpper[kPairs], rLower[kPairs];
  const auto load_x = [&](int row) {
    load_terms(rUpper, gX + row * params.x_stride, inside && row < rows);
    load_terms(rLower, gX + (row + 8) * params.x_stride, inside && row + 8 < rows);
  };
  load_x(quad);
#pragma unroll 1
  for (int64_t n = 0; n < params.columns; n += Config::kColumns) {
    uint32_t rB[kBlocks][kPairs];
    const int columns = static_cast<int>(min(params.columns - n, int64_t{Config::kColumns}));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int column = block / 4 * 32 + quad / 2 * 8 + block % 4 * 2 + quad % 2;
      const bool exists = inside && column < columns;
      if constexpr (Config::kAlongInner) {
        load_terms(rB[block], gY + (n + column) * params.y_stride, exists);
      } else {
        load_terms(rB[block], gY + n + column, params.y_stride, exists);
      }
    }
#pragma unroll 1
    for (int first = 0; first < rows; first += 16) {
      uint32_t rA[2 * kPairs];
      const int row = first + quad;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        rA[2 * pair] = rUpper[pair];
        rA[2 * pair + 1] = rLower[pair];
      }
      load_x(first + 16 < rows ? row + 16 : quad);
#pragma unroll
      for (int block = 0; block < kBlocks; block += 4) {
        float rC[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kPairs == 1) {
            ptx::mma_m16n8k8<Element>(rC[j], rA, rB[block + j][0]);
          } else {
            ptx::mma_m16n8k16<Element>(rC[j], rA, rB[block + j][0], rB[block + j][1]);
          }
        }
        const int column = block * 8 + quad_lane * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + half * 8 >= rows || column >= columns) continue;
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            words[j] = pack<Element>(rC[j][2 * half], rC[j][2 * half + 1]);
          }
          ptx::st_global_16(gOut + (row + half * 8) * params.columns + n + column,
                            make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }
}

template <typename Config>
cudaError_t launch_thin(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, Config::kRows);
  return launch_overlapping<jagged_dense_bmm_thin<Config>>(
      params.overlaps, params, {(tiles + Config::kWarps - 1) / Config::kWarps}, Config::kThreads, 0,
      stream, Config::kPath);
}

inline cudaError_t launch_thin(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const auto with_layout = [&](auto element, auto inner) {
    using Element = decltype(element);
    constexpr int kInner = decltype(inner)::value;
    return params.y_along_inner ? launch_thin<ThinConfig<Element, kInner, true>>(params, stream)
                                : launch_thin<ThinConfig<Element, kInner, false>>(params, stream);
  };
  const auto with_inner = [&](auto element) {
    return params.inner == 8 ? with_layout(element, std::integral_constant<int, 8>{})
                             : with_layout(element, std::integral_constant<int, 16>{});
  };
  return params.type == ElementType::kBf16 ? with_inner(__nv_bfloat16{}) : with_inner(__half{});
}

}  // namespace jagged_cuda::gemm
