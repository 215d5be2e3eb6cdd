// jagged_index_select: the plan that takes whole sequences by their numbers (rows/ranges.cuh).
//
// Its gradient: dx_b[i] = sum over the copies k of sequence b, in the order of k, of dz_k[i].
//
// Grid: x, a warp for each virtual tile of kRows rows of dx (prim/jagged.cuh). Lanes are beside each
// other along a row, in vectors of 16 bytes (or elements, where alignment forbids more); what they
// leave over of the warp takes the next rows. Each lane looks up one copy of the tile's sequence, 32
// at a time, and all add the rows of one copy after another: sums run in f32 (f64 of f64), in an
// order that depends on nothing else. No shared memory, no barriers. A sequence without copies, and
// rows outside every sequence, give zeros.
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/rows/ranges.cuh"
#include "cuda/kernels/rows/unit.cuh"

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

struct SumCopiesLaunch {
  SumCopiesParams params;
  int lanes_log2;
  int64_t tiles;
};

// The rows of the copy with place `place` in order; none at or past `end`.
__device__ __forceinline__ RowRange load_copy(const SumCopiesParams& params, int64_t place,
                                              int64_t end) {
  if (place >= end) return {0, 0};
  const int64_t copy = __ldg(params.order + place);
  if (copy < 0 || copy >= params.taken.num_seqs) return {0, 0};
  return sequence_rows(params.taken, copy);
}

template <typename Element, int kVector>
__global__ __launch_bounds__(kThreads) void sum_copies_kernel(
    const __grid_constant__ SumCopiesLaunch launch) {
  using S = Sum<Element>;
  using Loaded = Vector<Element, kVector>;
  const SumCopiesParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;
  const JaggedTile tile = find_tile<kRows>(params.offsets, index);
  if (tile.row >= tile.rows.len) return;
  const int64_t left = tile.rows.len - tile.row;
  const int rows = left < kRows ? static_cast<int>(left) : kRows;
  int64_t group = 0, group_end = 0;
  if (tile.seq >= 0) {
    const int64_t num_copies = params.taken.num_seqs;
    group = __ldg(params.groups + tile.seq);
    group_end = __ldg(params.groups + tile.seq + 1);
    group = group < 0 ? 0 : group;
    group_end = group_end > num_copies ? num_copies : group_end;
  }
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  const int first = lane >> launch.lanes_log2, step = 32 >> launch.lanes_log2;
  const Element* gCopies = static_cast<const Element*>(params.copies);
  Element* gOut = static_cast<Element*>(params.out) + (tile.rows.begin + tile.row) * params.columns;
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  int64_t loaded = group;
  RowRange own = load_copy(params, group + lane, group_end);
  // All lanes stay in the loops, since each hands on the copy that it has looked up.
  for (int64_t first_vector = 0; first_vector < vectors; first_vector += lanes) {
    const int64_t vector = first_vector + (lane & (lanes - 1));
    const bool exists = vector < vectors;
#pragma unroll 1
    for (int first_row = 0; first_row < rows; first_row += kItems * step) {
      S sum[kItems][kVector] = {};
      for (int64_t base = group; base < group_end; base += 32) {
        if (base != loaded) {
          own = load_copy(params, base + lane, group_end);
          loaded = base;
        }
        const int copies = group_end - base < 32 ? static_cast<int>(group_end - base) : 32;
#pragma unroll 1
        for (int copy = 0; copy < copies; ++copy) {
          const int64_t begin = __shfl_sync(0xffffffffu, own.begin, copy);
          const int64_t len = __shfl_sync(0xffffffffu, own.len, copy) - tile.row;
          const Element* gX = gCopies + (begin + tile.row) * params.stride + vector * kVector;
          Loaded rX[kItems];
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int row = first_row + first + i * step;
            if (exists && row < rows && row < len) {
              rX[i] = *reinterpret_cast<const Loaded*>(gX + row * params.stride);
            }
          }
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int row = first_row + first + i * step;
            if (exists && row < rows && row < len) {
#pragma unroll
              for (int e = 0; e < kVector; ++e) sum[i][e] += to_sum(rX[i].elems[e]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first_row + first + i * step;
        if (!exists || row >= rows) continue;
        Loaded result;
#pragma unroll
        for (int e = 0; e < kVector; ++e) result.elems[e] = from_sum<Element>(sum[i][e]);
        *reinterpret_cast<Loaded*>(gOut + row * params.columns + vector * kVector) = result;
      }
    }
  }
}

template <typename Element, int kVector>
cudaError_t launch_sum_copies(const SumCopiesParams& params, cudaStream_t stream) {
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kRows);
  const SumCopiesLaunch arguments{params, rows::lanes_log2(vectors), tiles};
  return launch<sum_copies_kernel<Element, kVector>>(arguments, {(tiles + kWarps - 1) / kWarps},
                                                     kThreads, 0, stream,
                                                     "cuda.jagged_index_select_backward");
}

}  // namespace

cudaError_t launch_jagged_index_select(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_index_select");
}

cudaError_t launch_jagged_index_select_backward(const SumCopiesParams& params,
                                                cudaStream_t stream) {
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    return params.vectors ? launch_sum_copies<Element, 16 / sizeof(Element)>(params, stream)
                          : launch_sum_copies<Element, 1>(params, stream);
  });
}

}  // namespace jagged_cuda
