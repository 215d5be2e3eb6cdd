// The rows of each sequence with the padded rows at the same places: jagged_dense_add and
// jagged_dense_mul.
//
//   z_b[i] = combine(x_b[i], y[b, i]) for i < M, else keep(x_b[i])
//
// Grid: x, a warp for each virtual tile of kRows rows (prim/jagged.cuh). Lanes are beside each
// other along a row, in vectors of 16 bytes (or elements, where alignment forbids them); what they
// leave over of the warp takes the next rows. No shared memory, no barriers. Tiles without rows
// return at once, rows outside every sequence become zeros, and a tile ends with its sequence.
//
// Each element is computed alone, in f32 (f64 of f64): deterministic.
#pragma once

#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/combine.h"
#include "cuda/kernels/rows/row_type.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda::rows {

struct Add {
  static constexpr bool kKeepsX = true;
  template <typename Element>
  static __device__ __forceinline__ Element apply(Element x, Element y) {
    if constexpr (std::is_same_v<Element, Truth>) {
      return Truth{static_cast<uint8_t>(x.value | y.value)};
    } else if constexpr (std::is_integral_v<Element>) {
      using Bits = std::make_unsigned_t<Element>;  // they wrap around
      return static_cast<Element>(static_cast<Bits>(x) + static_cast<Bits>(y));
    } else {
      return from_sum<Element>(to_sum(x) + to_sum(y));
    }
  }
};

struct Multiply {
  static constexpr bool kKeepsX = false;
  template <typename Element>
  static __device__ __forceinline__ Element apply(Element x, Element y) {
    return from_sum<Element>(to_sum(x) * to_sum(y));
  }
};

template <typename Combine, typename Element, int kVector>
__device__ __forceinline__ Vector<Element, kVector> combine(const Vector<Element, kVector>& x,
                                                            const Vector<Element, kVector>& y) {
  Vector<Element, kVector> result;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    result.elems[e] = Combine::apply(x.elems[e], y.elems[e]);
  }
  return result;
}

template <typename Element, int kVector>
__device__ __forceinline__ Vector<Element, kVector> load_vector(const Element* global) {
  return *reinterpret_cast<const Vector<Element, kVector>*>(global);
}

struct CombineLaunch {
  CombineParams params;
  int lanes_log2;  // vectors of a row beside each other
  int64_t tiles;
};

template <typename Combine, typename Element, int kVector>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ CombineLaunch launch) {
  using Loaded = Vector<Element, kVector>;
  const CombineParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kRows>(params.offsets, index);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kRows ? static_cast<int>(left) : kRows;
  const int64_t known = tile.seq < 0 ? 0 : params.max_len - tile.row;
  const int both = known < rows ? (known < 0 ? 0 : static_cast<int>(known)) : rows;
  const int kept = tile.seq < 0 ? 0 : (Combine::kKeepsX ? rows : both);  // rows of x that are read
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const int64_t global_row = tile.rows.begin + tile.row;
  const Element* gX = static_cast<const Element*>(params.x) + global_row * params.x_stride;
  const Element* gY = static_cast<const Element*>(params.y) + tile.seq * params.y_seq_stride +
                      tile.row * params.y_row_stride;
  Element* gOut = static_cast<Element*>(params.out) + global_row * params.columns;
  for (int64_t column = (lane & (lanes - 1)) * kVector; column < params.columns;
       column += lanes * kVector) {
#pragma unroll 1
    for (int row = first; row < rows; row += kItems * step) {
      Loaded rX[kItems], rY[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        rX[i] = rY[i] = Loaded{};
        if (row + i * step < kept) {
          rX[i] = load_vector<Element, kVector>(gX + (row + i * step) * params.x_stride + column);
        }
        if (row + i * step < both) {
          rY[i] =
              load_vector<Element, kVector>(gY + (row + i * step) * params.y_row_stride + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (row + i * step < rows) {
          // Not combined where y ends: -0 + 0 would be 0.
          const Loaded result = row + i * step < both ? combine<Combine>(rX[i], rY[i]) : rX[i];
          *reinterpret_cast<Loaded*>(gOut + (row + i * step) * params.columns + column) = result;
        }
      }
    }
  }
}

// launch(vector) with a Vector of the elements that lanes take at a time.
template <typename Element, typename Launch>
cudaError_t with_vector(bool vectors, Launch launch) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(Element));
  return vectors ? launch(Vector<Element, kWide>{}) : launch(Vector<Element, 1>{});
}

template <typename Combine, typename Element>
cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream, const char* path) {
  return with_vector<Element>(params.vectors, [&](auto vector) {
    constexpr int kVector = sizeof(vector) / sizeof(Element);
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kRows);
    const CombineLaunch arguments{params, lanes_log2((params.columns + kVector - 1) / kVector),
                                  tiles};
    return launch<combine_kernel<Combine, Element, kVector>>(
        arguments, {(tiles + kWarps - 1) / kWarps}, kThreads, 0, stream, path);
  });
}

}  // namespace jagged_cuda::rows
