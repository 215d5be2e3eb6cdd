// The gradients of jagged_dense_add and jagged_dense_mul, both in one pass over the rows:
//
//   dx_b[i] = gradient(dz_b[i], y[b, i])      dy[b, i] = gradient(dz_b[i], x_b[i])   for i < M
//   dx_b[i] = keep(dz_b[i])                                                         from M on
//   dy[b, i] = 0                                                                    from L on
//
// where gradient(dz, other) is dz of a sum, and dz other of a product.
//
// Grid: x, of two kinds. First a warp for each `warp_rows` <= 32 rows of dx, of whichever sequences: as
// many as its lanes have in flight at once. What lies beside each other, dz and x, is asked for first,
// since that needs no offsets. Meanwhile each lane finds the place of one row (rows/places.cuh), and with
// it the row of y and dy; shuffles tell the others. Then a warp for each `fill_rows` <= 32 rows of dy,
// taken as [B * M] rows, which writes zeros where the sequence has none. Lanes are beside each other
// along a row, in vectors of 16 bytes (or elements, where alignment forbids them); what they leave over
// of the warp takes the next rows. No shared memory, no barriers. Rows of dx outside every sequence
// become zeros.
//
// One row of y belongs to one row of x, so that nothing is summed: deterministic.
#pragma once

#include "cuda/kernels/rows/combine.cuh"

#include <algorithm>

namespace jagged_cuda::rows {

// Rows that a lane has in flight, and CTAs per SM that the registers must leave room for: a product
// reads three operands of each.
template <typename Combine>
constexpr int kGradientItems = Combine::kKeepsX ? 4 : 3;
template <typename Combine>
constexpr int kGradientCtas = Combine::kKeepsX ? 8 : 7;

// Of wide rows a warp fills fewer: what all warps are at lies closer together in memory.
constexpr int kFewestRows = 8, kFillBytes = 4096;

inline int fill_rows(int64_t row_bytes) {
  int rows = kRows;
  while (rows > kFewestRows && rows * row_bytes > kFillBytes) rows /= 2;
  return rows;
}

struct CombineBackwardLaunch {
  CombineBackwardParams params;
  int lanes_log2;    // vectors of a row beside each other
  int warp_rows;     // of the first kind: at most kRows, and what the lanes have in flight
  int fill_rows;     // of the second: at most kRows
  int64_t row_ctas;  // of the first kind
};

// Rows of dx that a warp writes: a lane has some of them in flight, in vectors beside each other.
template <typename Combine, typename Element, int kVector>
struct GradientRows {
  using Loaded = Raw<Element, kVector>;
  static constexpr bool kIsProduct = !Combine::kKeepsX;
  static constexpr int kOwn = kGradientItems<Combine>;
  static constexpr unsigned kAllLanes = 0xffffffffu;

  int64_t begin;
  int rows;
  int64_t column;   // of the lane's vector
  int first, step;  // the lane's first row, and how far the next one is
  Loaded rGrad[kOwn], rX[kIsProduct ? kOwn : 1];

  // What lies beside each other, whichever sequences have it.
  __device__ __forceinline__ void load(const CombineBackwardParams& params) {
    const Element* gGrad =
        static_cast<const Element*>(params.grad_out) + begin * params.grad_stride + column;
    const Element* gX = static_cast<const Element*>(params.x) + begin * params.x_stride + column;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = first + i * step;
      const bool exists = own < rows && column < params.columns;
      rGrad[i] = Loaded{};
      if (exists) rGrad[i] = *reinterpret_cast<const Loaded*>(gGrad + own * params.grad_stride);
      if constexpr (kIsProduct) {
        rX[i] = Loaded{};
        if (exists) rX[i] = *reinterpret_cast<const Loaded*>(gX + own * params.x_stride);
      }
    }
  }

  // Lane i says of the i-th row where its row of y and of dy begins, `kept` which rows have a gradient.
  __device__ __forceinline__ void store(const CombineBackwardParams& params, unsigned kept,
                                        int64_t y_begin, int64_t grad_y_begin) const {
    const Element* gY = static_cast<const Element*>(params.y) + column;
    Element* gGradX = static_cast<Element*>(params.grad_x) + begin * params.columns + column;
    Element* gGradY = static_cast<Element*>(params.grad_y) + column;
    Loaded rY[kIsProduct ? kOwn : 1];
    if constexpr (kIsProduct) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int own = first + i * step;
        const int64_t from = __shfl_sync(kAllLanes, y_begin, own & 31);
        const bool is_read = own < rows && column < params.columns && (kept >> (own & 31) & 1) != 0;
        rY[i] = Loaded{};
        if (is_read) rY[i] = *reinterpret_cast<const Loaded*>(gY + from);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = first + i * step;
      const int64_t to = __shfl_sync(kAllLanes, grad_y_begin, own & 31);
      if (own >= rows || column >= params.columns) continue;
      const bool is_kept = (kept >> (own & 31) & 1) != 0;
      Loaded grad_x = is_kept ? rGrad[i] : Loaded{}, grad_y = grad_x;
      if constexpr (kIsProduct) {
        if (is_kept) {
          grad_x = combine<Combine, Element, kVector>(rGrad[i], rY[i]);
          grad_y = combine<Combine, Element, kVector>(rGrad[i], rX[i]);
        }
      }
      *reinterpret_cast<Loaded*>(gGradX + own * params.columns) = grad_x;
      if (to != kNothing) *reinterpret_cast<Loaded*>(gGradY + to) = grad_y;
    }
  }
};

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
__global__ __launch_bounds__(kThreads, kGradientCtas<Combine>) void combine_backward_kernel(
    const __grid_constant__ CombineBackwardLaunch launch) {
  const CombineBackwardParams& params = launch.params;
  if (blockIdx.x >= launch.row_ctas) {
    const int64_t warp = (blockIdx.x - launch.row_ctas) * kWarps + threadIdx.x / 32;
    fill_gradients<Element, kVector>(params, warp * launch.fill_rows, launch.fill_rows,
                                     launch.lanes_log2);
    return;
  }
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  const int64_t begin = warp * launch.warp_rows, left = params.offsets.total - begin;
  if (left <= 0) return;
  const int lane = threadIdx.x % 32, lanes = 1 << launch.lanes_log2;
  GradientRows<Combine, Element, kVector> tile;
  tile.begin = begin;
  tile.rows = left < launch.warp_rows ? static_cast<int>(left) : launch.warp_rows;
  tile.column = (lane & (lanes - 1)) * kVector;
  tile.first = lane >> launch.lanes_log2;
  tile.step = 32 >> launch.lanes_log2;
  tile.load(params);  // on its way during the search
  Place place[1];
  find_places(params.offsets, begin, place);
  const auto [seq, row] = place[0];
  int64_t y_begin = kNothing, grad_y_begin = kNothing;
  if (seq >= 0 && row < params.max_len) {
    y_begin = seq * params.y_seq_stride + row * params.y_row_stride;
    grad_y_begin = (seq * params.max_len + row) * params.columns;
  }
  const unsigned kept =
      __ballot_sync(0xffffffffu, Combine::kKeepsX ? seq >= 0 : grad_y_begin != kNothing);
  while (true) {
    tile.store(params, kept, y_begin, grad_y_begin);
    const int64_t group = tile.column - (lane & (lanes - 1)) * kVector + lanes * kVector;
    if (group >= params.columns) return;
    tile.column += lanes * kVector;
    tile.load(params);
  }
}

template <typename Combine>
cudaError_t launch_combine_backward(const CombineBackwardParams& params, cudaStream_t stream,
                                    const char* path) {
  const int64_t padded_rows = params.offsets.num_seqs * params.max_len;
  return with_element(params.type, [&](auto element) {
    using Given = decltype(element);
    // A sum's gradients are copies: one kernel for both types of 16 bits.
    using Element = std::conditional_t<Combine::kKeepsX && sizeof(Given) == 2, __half, Given>;
    return with_vector<Element>(params.vectors, [&](auto vector) {
      constexpr int kVector = sizeof(vector) / sizeof(Element);
      const int log2 = lanes_log2((params.columns + kVector - 1) / kVector);
      const int rows = std::min(kRows, kGradientItems<Combine> * (32 >> log2));
      const int filled = fill_rows(params.columns * int64_t{sizeof(Element)});
      const int64_t row_ctas = (params.offsets.total + kWarps * rows - 1) / (kWarps * rows);
      const int64_t fill_ctas = (padded_rows + kWarps * filled - 1) / (kWarps * filled);
      const CombineBackwardLaunch arguments{params, log2, rows, filled, row_ctas};
      return launch<combine_backward_kernel<Combine, Element, kVector>>(
          arguments, {row_ctas + fill_ctas}, kThreads, 0, stream, path);
    });
  });
}

}  // namespace jagged_cuda::rows
