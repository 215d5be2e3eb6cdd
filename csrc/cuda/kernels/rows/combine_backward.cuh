// The gradients of jagged_dense_add and jagged_dense_mul, both in one pass over the rows:
//
//   dx_b[i] = gradient(dz_b[i], y[b, i])      dy[b, i] = gradient(dz_b[i], x_b[i])   for i < M
//   dx_b[i] = keep(dz_b[i])                                                         from M on
//   dy[b, i] = 0                                                                    from L on
//
// where gradient(dz, other) is dz of a sum, and dz other of a product.
//
// Grid: x, of two kinds. First a warp for each `warp_rows` <= 32 rows of dx, of whichever sequences:
// each lane finds the place of one of them (rows/places.cuh), and with it the row of dy; shuffles tell
// the others. Then a warp for as many rows of dy, taken as [B * M] rows, which writes zeros where the
// sequence has none. Lanes are beside each other along a row, in vectors of 16 bytes (or
// elements, where alignment forbids them); what they leave over of the warp takes the next rows. No
// shared memory, no barriers. Rows of dx outside every sequence become zeros.
//
// One row of y belongs to one row of x, so that nothing is summed: deterministic.
#pragma once

#include "cuda/kernels/rows/combine.cuh"

namespace jagged_cuda::rows {

// Rows that a lane has in flight, and CTAs per SM that the registers must leave room for: of a product,
// which reads three operands, fewer rows and more CTAs are faster.
template <typename Combine>
constexpr int kGradientItems = Combine::kKeepsX ? 4 : 2;
constexpr int kGradientCtas = 8;

// Of wide rows a warp takes fewer: what all warps are at lies closer together in memory (rows of 512
// bytes: 266 us with 8 rows, 277 with 32; of 128 bytes 94 and 73, since there is more to search).
constexpr int kFewestRows = 8, kWarpBytes = 4096;

inline int gradient_rows(int64_t row_bytes) {
  int rows = kRows;
  while (rows > kFewestRows && rows * row_bytes > kWarpBytes) rows /= 2;
  return rows;
}

struct CombineBackwardLaunch {
  CombineBackwardParams params;
  int lanes_log2;    // vectors of a row beside each other
  int warp_rows;     // at most kRows
  int64_t row_ctas;  // of the first kind
};

// `rows` <= 32 rows of dx, of which lane i has the i-th: whether it is in a sequence, and where its
// row of y and of dy begins. All lanes of a warp together.
template <typename Combine, typename Element, int kVector>
__device__ __forceinline__ void combine_gradients(const CombineBackwardParams& params,
                                                  int64_t begin, int rows, bool inside,
                                                  int64_t y_begin, int64_t grad_y_begin,
                                                  int lanes_log2) {
  using Loaded = Raw<Element, kVector>;
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr bool kIsProduct = !Combine::kKeepsX;
  constexpr int kOwn = kGradientItems<Combine>;
  const int64_t columns = params.columns;
  const Element* gGrad = static_cast<const Element*>(params.grad_out) + begin * params.grad_stride;
  const Element* gX = static_cast<const Element*>(params.x) + begin * params.x_stride;
  const Element* gY = static_cast<const Element*>(params.y);
  Element* gGradX = static_cast<Element*>(params.grad_x) + begin * columns;
  Element* gGradY = static_cast<Element*>(params.grad_y);
  const int lane = threadIdx.x % 32, lanes = 1 << lanes_log2;
  const int first = lane >> lanes_log2, step = 32 >> lanes_log2;
  const unsigned read = __ballot_sync(kAllLanes, kIsProduct ? grad_y_begin != kNothing : inside);
  for (int64_t group = 0; group < columns; group += lanes * kVector) {
    const int64_t column = group + (lane & (lanes - 1)) * kVector;
    const bool exists = column < columns;
#pragma unroll 1
    for (int row = 0; row < rows; row += kOwn * step) {
      Loaded rGrad[kOwn], rX[kOwn], rY[kOwn];
      int64_t to[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int own = row + first + i * step;
        to[i] = __shfl_sync(kAllLanes, grad_y_begin, own & 31);
        rGrad[i] = rX[i] = rY[i] = Loaded{};
        const bool is_read = exists && own < rows && (read >> (own & 31) & 1) != 0;
        if (is_read) {
          rGrad[i] = *reinterpret_cast<const Loaded*>(gGrad + own * params.grad_stride + column);
        }
        if constexpr (kIsProduct) {
          const int64_t y = __shfl_sync(kAllLanes, y_begin, own & 31);
          if (is_read) {
            rX[i] = *reinterpret_cast<const Loaded*>(gX + own * params.x_stride + column);
            rY[i] = *reinterpret_cast<const Loaded*>(gY + y + column);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int own = row + first + i * step;
        if (!exists || own >= rows) continue;
        Loaded grad_x = rGrad[i], grad_y = rGrad[i];
        if constexpr (kIsProduct) {
          grad_x = combine<Combine, Element, kVector>(rGrad[i], rY[i]);
          grad_y = combine<Combine, Element, kVector>(rGrad[i], rX[i]);
        }
        *reinterpret_cast<Loaded*>(gGradX + own * columns + column) = grad_x;
        if (to[i] != kNothing) *reinterpret_cast<Loaded*>(gGradY + to[i] + column) = grad_y;
      }
    }
  }
}

// Zeros for those of the `rows` rows of dy from `begin` on that no row of a sequence has.
template <typename Element, int kVector>
__device__ __forceinline__ void fill_gradients(const CombineBackwardParams& params, int64_t begin,
                                               int rows, int lanes_log2) {
  using Stored = Raw<Element, kVector>;
  const int lane = threadIdx.x % 32, lanes = 1 << lanes_log2, step = 32 >> lanes_log2;
  bool is_padding = false;
  if (lane < rows && begin + lane < params.offsets.num_seqs * params.max_len) {
    const int64_t seq = (begin + lane) / params.max_len;
    is_padding = begin + lane - seq * params.max_len >= sequence_rows(params.offsets, seq).len;
  }
  const unsigned padding = __ballot_sync(0xffffffffu, is_padding);
  if (padding == 0) return;
  Element* gGradY = static_cast<Element*>(params.grad_y) + begin * params.columns;
  for (int64_t column = (lane & (lanes - 1)) * kVector; column < params.columns;
       column += lanes * kVector) {
#pragma unroll 4
    for (int row = lane >> lanes_log2; row < rows; row += step) {
      if ((padding >> row & 1) != 0) {
        *reinterpret_cast<Stored*>(gGradY + row * params.columns + column) = Stored{};
      }
    }
  }
}

template <typename Combine, typename Element, int kVector>
__global__ __launch_bounds__(kThreads, kGradientCtas) void combine_backward_kernel(
    const __grid_constant__ CombineBackwardLaunch launch) {
  const CombineBackwardParams& params = launch.params;
  const int warp_rows = launch.warp_rows;
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (blockIdx.x >= launch.row_ctas) {
    fill_gradients<Element, kVector>(params, (warp - launch.row_ctas * kWarps) * warp_rows,
                                     warp_rows, launch.lanes_log2);
    return;
  }
  const int64_t begin = warp * warp_rows, left = params.offsets.total - begin;
  if (left <= 0) return;
  Segment segment = segment_of_row(params.offsets, begin);
  Place place[1];
  find_places(params.offsets, begin, segment, place);
  const auto [seq, row] = place[0];
  int64_t y_begin = kNothing, grad_y_begin = kNothing;
  if (seq >= 0 && row < params.max_len) {
    y_begin = seq * params.y_seq_stride + row * params.y_row_stride;
    grad_y_begin = (seq * params.max_len + row) * params.columns;
  }
  combine_gradients<Combine, Element, kVector>(
      params, begin, left < warp_rows ? static_cast<int>(left) : warp_rows, seq >= 0, y_begin,
      grad_y_begin, launch.lanes_log2);
}

template <typename Combine>
cudaError_t launch_combine_backward(const CombineBackwardParams& params, cudaStream_t stream,
                                    const char* path) {
  const int64_t padded_rows = params.offsets.num_seqs * params.max_len;
  return with_element(params.type, [&](auto element) {
    using Element = decltype(element);
    const int warp_rows = gradient_rows(params.columns * int64_t{sizeof(Element)});
    const int64_t cta_rows = int64_t{kWarps} * warp_rows;
    const int64_t row_ctas = (params.offsets.total + cta_rows - 1) / cta_rows;
    const int64_t ctas = row_ctas + (padded_rows + cta_rows - 1) / cta_rows;
    return with_vector<Element>(params.vectors, [&](auto vector) {
      constexpr int kVector = sizeof(vector) / sizeof(Element);
      const CombineBackwardLaunch arguments{
          params, lanes_log2((params.columns + kVector - 1) / kVector), warp_rows, row_ctas};
      return launch<combine_backward_kernel<Combine, Element, kVector>>(arguments, {ctas}, kThreads,
                                                                        0, stream, path);
    });
  });
}

}  // namespace jagged_cuda::rows
