// jagged_concat:
//
//   z_b = [x0_b, x1_b, ...]      offsets'[b] = sum over the parts p of offsets_p[b] - offsets_p[0]
//
// and the gradients of all parts: row i of x_p,b is row i + sum of L_q,b over the parts before of z_b.
//
// Grid: x, a warp for each kRows rows of the result, of whichever sequences. Each lane finds the place
// of one row (rows/places.cuh) in the joined offsets, which nobody has to add up beforehand, then the
// part that has it; the warp copies the rows (rows/move.cuh). Of rows of one unit, numbers, a warp
// takes four times as many, and a lane finds and moves four beside each other. All threads share the
// offsets of the result. The gradients of all parts are one grid, part after part. No shared memory, no
// barriers.
//
// A part without offsets is dense. Rows of the result behind the last sequence, and rows of a part
// outside every sequence or beyond the capacity, become zeros. With wrong offsets the sums are of no
// use, but every bound and row is cut to its tensor.
#include "cuda/kernels/jagged_concat.h"

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/rows/move.cuh"
#include "cuda/kernels/rows/places.cuh"

#include <algorithm>

namespace jagged_cuda {

// The rows of sequence `seq`.
__device__ __forceinline__ RowRange part_rows(const ConcatPart& part, int64_t seq) {
  if (part.offsets.data != nullptr) return sequence_rows(part.offsets, seq);
  return {seq * part.each, part.each};
}

// How many rows of all parts lie before sequence `seq`.
__device__ __forceinline__ int64_t rows_before(const JoinedView& joined, int64_t seq) {
  int64_t rows = 0;
#pragma unroll
  for (int p = 0; p < kConcatParts; ++p) {
    const ConcatPart& part = joined.parts[p];
    rows += part.offsets.data == nullptr
                ? seq * part.each
                : clamped_offset(part.offsets, seq) - clamped_offset(part.offsets, 0);
  }
  return rows;
}

// As that of OffsetsView (prim/jagged.cuh), for its searches.
__device__ __forceinline__ int64_t segment_bound(const JoinedView& joined, int64_t segment) {
  if (segment <= 0) return 0;
  if (segment > joined.num_seqs + 1) return joined.total;
  const int64_t rows = rows_before(joined, segment - 1);
  return rows < 0 ? 0 : rows > joined.total ? joined.total : rows;
}

namespace {

using rows::kRows;
using rows::kThreads;
using rows::kWarps;
using rows::Place;

constexpr int kLaneUnits = 4;    // rows of one unit that a lane moves
constexpr int kConcatCtas = 10;  // per SM, that the registers must leave room for

struct JaggedConcatLaunch {
  JaggedConcatParams params;
  int lanes_log2;
};

constexpr int warp_rows(int64_t row_units) { return row_units == 1 ? kLaneUnits * kRows : kRows; }

// Stores four units beside each other, as far as `left` goes.
template <typename Unit>
__device__ __forceinline__ void store_units(Unit* gOut, const Unit (&units)[kLaneUnits],
                                            int64_t left) {
  struct alignas(sizeof(Unit) * kLaneUnits) Units {
    Unit units[kLaneUnits];
  };
  if (sizeof(Units) <= 16 && left >= kLaneUnits) {
    *reinterpret_cast<Units*>(gOut) = Units{units[0], units[1], units[2], units[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneUnits; ++i) {
    if (i < left) gOut[i] = units[i];
  }
}

// Where row `place.row` of the sequence is; null for none.
template <typename Unit>
__device__ __forceinline__ const Unit* find_row(const JoinedView& joined, const Place& place) {
  if (place.seq < 0) return nullptr;
  int64_t row = place.row;
#pragma unroll
  for (int p = 0; p < kConcatParts; ++p) {
    const ConcatPart& part = joined.parts[p];
    const RowRange range = part_rows(part, place.seq);
    if (row < range.len) {
      return static_cast<const Unit*>(part.data) + (range.begin + row) * part.stride;
    }
    row -= range.len;
  }
  return nullptr;
}

// The offsets of the result, by all threads of the grid.
__device__ __forceinline__ void write_planned(const JaggedConcatParams& params) {
  const JoinedView& joined = params.joined;
  for (int64_t seq = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; seq <= joined.num_seqs;
       seq += gridDim.x * int64_t{blockDim.x}) {
    const int64_t begin = rows_before(joined, seq);
    const int64_t cut = begin < joined.total ? begin : joined.total;
    if (params.wide) {
      static_cast<int64_t*>(params.planned)[seq] = cut;
    } else {
      static_cast<int*>(params.planned)[seq] = static_cast<int>(cut);
    }
    if (params.uncut != nullptr) params.uncut[seq] = begin;
  }
}

template <typename Unit, bool kNumbers>
__global__ __launch_bounds__(kThreads, kConcatCtas) void jagged_concat_kernel(
    const __grid_constant__ JaggedConcatLaunch launch) {
  const JaggedConcatParams& params = launch.params;
  const JoinedView& joined = params.joined;
  write_planned(params);
  const int64_t begin =
      (blockIdx.x * int64_t{kWarps} + threadIdx.x / 32) * (kNumbers ? kLaneUnits * kRows : kRows);
  const int64_t left = params.rows - begin;
  if (left <= 0 || params.row_units == 0) return;
  if constexpr (kNumbers) {
    Place places[kLaneUnits];
    rows::find_places(joined, begin, places);
    const int first = threadIdx.x % 32 * kLaneUnits;
    Unit units[kLaneUnits];
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i) {
      const Unit* found = find_row<Unit>(joined, places[i]);
      units[i] = found == nullptr ? Unit{} : __ldg(found);
    }
    store_units(static_cast<Unit*>(params.out) + begin + first, units, left - first);
  } else {
    Place place[1];
    rows::find_places(joined, begin, place);
    rows::copy_found_rows(
        find_row<Unit>(joined, place[0]), static_cast<Unit*>(params.out) + begin * params.row_units,
        left < kRows ? static_cast<int>(left) : kRows, params.row_units, launch.lanes_log2);
  }
}

struct JaggedConcatBackwardLaunch {
  JaggedConcatBackwardParams params;
  int lanes_log2;
};

// Where in the result row `row` of part `part` went, that is at `place`; -1 for nowhere. Of the other
// parts' offsets alone something is read: what lies before the row in its own is its number.
__device__ __forceinline__ int64_t joined_row(const JoinedView& joined, int part, int64_t row,
                                              const Place& place) {
  if (place.seq < 0) return -1;
#pragma unroll
  for (int p = 0; p < kConcatParts; ++p) {
    const ConcatPart& other = joined.parts[p];
    const bool is_dense = other.offsets.data == nullptr;
    if (!is_dense) row -= clamped_offset(other.offsets, 0);
    if (p == part) continue;
    const int64_t seq = place.seq + (p < part ? 1 : 0);
    row += is_dense ? seq * other.each : clamped_offset(other.offsets, seq);
  }
  return row >= 0 && row < joined.total ? row : -1;
}

// Row `row` of a dense part.
__device__ __forceinline__ Place dense_place(const JoinedView& joined, const ConcatPart& part,
                                             int64_t row) {
  const int64_t seq = part.each > 0 ? row / part.each : joined.num_seqs;
  return {seq < joined.num_seqs ? seq : -1, row - seq * part.each};
}

template <typename Unit, bool kNumbers>
__global__ __launch_bounds__(kThreads, kConcatCtas) void jagged_concat_backward_kernel(
    const __grid_constant__ JaggedConcatBackwardLaunch launch) {
  const JaggedConcatBackwardParams& params = launch.params;
  const JoinedView& joined = params.joined;
  const int own_rows = kNumbers ? kLaneUnits * kRows : kRows;
  int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  int part = 0;
  for (; part < kConcatParts; ++part) {
    const int64_t warps = (joined.parts[part].offsets.total + own_rows - 1) / own_rows;
    if (warp < warps) break;
    warp -= warps;
  }
  if (part == kConcatParts) return;
  const ConcatPart& own = joined.parts[part];
  const int64_t begin = warp * own_rows, left = own.offsets.total - begin;
  const int lane = threadIdx.x % 32;
  const bool is_dense = own.offsets.data == nullptr;
  const Unit* gGrad = static_cast<const Unit*>(params.grad_out);
  if constexpr (kNumbers) {
    const int first = lane * kLaneUnits;
    Place places[kLaneUnits];
    if (!is_dense) rows::find_places(own.offsets, begin, places);
    Unit units[kLaneUnits];
#pragma unroll
    for (int i = 0; i < kLaneUnits; ++i) {
      const int64_t row = begin + first + i;
      const int64_t from =
          joined_row(joined, part, row, is_dense ? dense_place(joined, own, row) : places[i]);
      units[i] = from < 0 ? Unit{} : __ldg(gGrad + from * params.stride);
    }
    store_units(static_cast<Unit*>(own.data) + begin + first, units, left - first);
  } else {
    Place place[1];
    if (is_dense) {
      place[0] = dense_place(joined, own, begin + lane);
    } else {
      rows::find_places(own.offsets, begin, place);
    }
    const int64_t from = joined_row(joined, part, begin + lane, place[0]);
    rows::copy_found_rows(from < 0 ? nullptr : gGrad + from * params.stride,
                          static_cast<Unit*>(own.data) + begin * params.row_units,
                          left < kRows ? static_cast<int>(left) : kRows, params.row_units,
                          launch.lanes_log2);
  }
}

}  // namespace

cudaError_t launch_jagged_concat(const JaggedConcatParams& params, cudaStream_t stream) {
  const JaggedConcatLaunch arguments{params, rows::lanes_log2(params.row_units)};
  const int64_t cta_rows = int64_t{kWarps} * warp_rows(params.row_units);
  // At least so many that offsets take few steps.
  const Grid grid{std::max((params.rows + cta_rows - 1) / cta_rows,
                           params.joined.num_seqs / (16 * kThreads) + 1)};
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    return params.row_units == 1
               ? launch<jagged_concat_kernel<Unit, true>>(arguments, grid, kThreads, 0, stream,
                                                          "cuda.jagged_concat.numbers")
               : launch<jagged_concat_kernel<Unit, false>>(arguments, grid, kThreads, 0, stream,
                                                           "cuda.jagged_concat");
  });
}

cudaError_t launch_jagged_concat_backward(const JaggedConcatBackwardParams& params,
                                          cudaStream_t stream) {
  const JaggedConcatBackwardLaunch arguments{params, rows::lanes_log2(params.row_units)};
  const int own_rows = warp_rows(params.row_units);
  int64_t warps = 0;
  for (const ConcatPart& part : params.joined.parts) {
    warps += (part.offsets.total + own_rows - 1) / own_rows;
  }
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    const Grid grid{(warps + kWarps - 1) / kWarps};
    return params.row_units == 1
               ? launch<jagged_concat_backward_kernel<Unit, true>>(
                     arguments, grid, kThreads, 0, stream, "cuda.jagged_concat_backward.numbers")
               : launch<jagged_concat_backward_kernel<Unit, false>>(
                     arguments, grid, kThreads, 0, stream, "cuda.jagged_concat_backward");
  });
}

}  // namespace jagged_cuda
