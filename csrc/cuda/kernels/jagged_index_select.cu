// jagged_index_select: whole sequences by their numbers. Its plan alone is rows/ranges.cuh's.
//
//   z_k[i] = x_b[i] with b = chosen[k]
//
// and its gradient: dx_b[i] = sum over the copies k of sequence b, in the order of k, of dz_k[i].
//
// Both are two kernels, of which the second goes through the rows of x: a row is read once for all of
// its copies, wherever these are in the result.
//
// First kernel: the rows of the copies of the first sequence, then those of the next, and
// groups[b] = where those of b begin. Both are counts over all keys, number * kMostCounted + k,
//     place of k = # { keys below that of k },   groups[b] = # { keys below that of b without copy },
// so that nothing is sorted or added atomically. A copy before which none has its number is its
// sequence's first, and says where it is: the second kernel then need not ask for more where a sequence
// has no other. Forward the offsets of the copies are made here too: each CTA adds the lengths of all
// copies before its own. Grid: x, a CTA for each 32 of these M + B + 1 counts, a lane for each; each of
// its warps counts over a part of the keys, four at a time from shared memory, where all are. Shared
// memory: keys (16 KiB) and the counts and lengths of all warps (8 KiB), each published by a barrier.
// Where a sort has found the order already, it is only followed.
//
// Second kernel, which starts while the first runs, and waits for it once it has found its tile.
// Grid: x, a warp for each virtual tile of kCopyRows rows of x, or twice as many narrow ones forward
// (prim/jagged.cuh).
// Lanes are beside each other along a row, in units of up to 16 bytes (of the gradient in vectors of
// 16 bytes, or elements where alignment forbids them); what they leave over of the warp takes the next
// rows. Each lane looks up one copy of the tile's sequence, 32 at a time. No shared memory, no barriers.
//   Forward, rows are written to one copy after another; rows behind the last copy become zeros.
//   Backward, a row with one copy is copied, of more they are added in pairs, one copy after another:
//   sums run in f32 (f64 of f64), in an order that depends on nothing else. A sequence without
//   copies, and rows outside every sequence, give zeros.
#include "cuda/kernels/jagged_index_select.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"
#include "cuda/kernels/rows/ranges.cuh"
#include "cuda/kernels/rows/unit.cuh"

#include <algorithm>
#include <type_traits>

namespace jagged_cuda {
namespace {

using rows::kItems;
using rows::kRows;
using rows::kThreads;
using rows::kWarps;

constexpr int kGroupWarps = 32;
constexpr int kNoKey = 0x7fffffff;  // behind every copy's
constexpr int kFollowThreads = 256;
constexpr int kCopyRows = 16;           // of a tile: those with many copies take long
constexpr int kPairItems = kItems / 2;  // rows of two copies that a lane has in flight
constexpr int kSumCtas = 7;             // per SM, that the registers must leave room for
constexpr int kWriteCtas = 8;           // likewise
constexpr int kNarrowBytes = 128;       // rows of so many: tiles twice as high, when they are read

// The rows of copy `copy`; none if there is no such copy.
__device__ __forceinline__ CopyRows rows_of_copy(const OffsetsView& taken, int64_t copy) {
  if (copy < 0 || copy >= taken.num_seqs) return {0, 0};
  const RowRange rows = sequence_rows(taken, copy);
  return {rows.begin, rows.len};
}

// How many rows copy `copy` has if all of them are taken; none if there is no such copy.
__device__ __forceinline__ int64_t planned_len(const GroupCopiesParams& params, int64_t copy) {
  if (copy >= params.num_copies) return 0;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return 0;
  return sequence_rows(params.source, number).len;
}

// Writes where copy `copy` begins, and says which rows are left of it.
__device__ __forceinline__ CopyRows plan_copy(const GroupCopiesParams& params, int64_t copy,
                                              int64_t begin, int64_t len) {
  const auto cut = [&](int64_t place) { return place < params.capacity ? place : params.capacity; };
  if (params.source.wide) {
    static_cast<int64_t*>(params.planned)[copy] = cut(begin);
  } else {
    static_cast<int*>(params.planned)[copy] = static_cast<int>(cut(begin));
  }
  if (params.uncut != nullptr) params.uncut[copy] = begin;
  return {cut(begin), cut(begin + len) - cut(begin)};
}

// The sum of `own` over the lanes up to this one.
__device__ __forceinline__ int64_t sum_up_to_lane(int64_t own) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, own, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) own += other;
  }
  return own;
}

template <bool kPlans>
__global__ __launch_bounds__(kGroupWarps * 32) void group_copies_kernel(
    const __grid_constant__ GroupCopiesParams params) {
  ptx::griddepcontrol_launch_dependents();  // the second kernel finds its tiles meanwhile
  __shared__ alignas(16) int sKeys[kMostCounted];
  __shared__ int sBefore[kGroupWarps][32], sLess[kGroupWarps][32];
  __shared__ int64_t sRows[kGroupWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int copies = static_cast<int>(params.num_copies);
  const int seqs = static_cast<int>(params.num_seqs);
  const int first = static_cast<int>(blockIdx.x) * 32, item = first + lane;
  const bool is_copy = item < copies;
  CopyRows own{0, 0};
  if (warp == 0) {
    if constexpr (kPlans) {
      own.len = planned_len(params, item);
    } else if (is_copy) {
      own = rows_of_copy(params.taken, item);
    }
  }
  // Shares are whole vectors.
  const int share = (copies + 4 * kGroupWarps - 1) / (4 * kGroupWarps) * 4;
  int64_t rows = 0;  // of the copies before this CTA's
#pragma unroll 4
  for (int k = threadIdx.x; k < share * kGroupWarps; k += kGroupWarps * 32) {
    const int64_t number = k < copies ? __ldg(params.chosen + k) : 0;
    // Numbers that are none of a sequence come first or last.
    const int cut = number < 0 ? -1 : number < seqs ? static_cast<int>(number) : seqs;
    sKeys[k] = k < copies ? cut * static_cast<int>(kMostCounted) + k : kNoKey;
    if constexpr (kPlans) {
      if (k < first) rows += planned_len(params, k);
    }
  }
  if constexpr (kPlans) {
    rows = sum_up_to_lane(rows);
    if (lane == 31) sRows[warp] = rows;
  }
  __syncthreads();  // all keys are there, and the rows of each warp
  const int own_key = is_copy ? sKeys[item] : (item - copies) * static_cast<int>(kMostCounted);
  // Of a sequence: no copy comes before the first that could have its number.
  const int first_key = own_key - (is_copy ? item : 0);
  int before = 0, less = 0;
#pragma unroll 4
  for (int k = warp * share; k < (warp + 1) * share; k += 4) {
    const int4 keys = *reinterpret_cast<const int4*>(&sKeys[k]);
    before += (keys.x < own_key ? 1 : 0) + (keys.y < own_key ? 1 : 0) + (keys.z < own_key ? 1 : 0) +
              (keys.w < own_key ? 1 : 0);
    less += (keys.x < first_key ? 1 : 0) + (keys.y < first_key ? 1 : 0) +
            (keys.z < first_key ? 1 : 0) + (keys.w < first_key ? 1 : 0);
  }
  sBefore[warp][lane] = before;
  sLess[warp][lane] = less;
  __syncthreads();  // the counts of all warps are there
  if (warp != 0) return;
  int sum = 0, sum_less = 0;
#pragma unroll
  for (int w = 0; w < kGroupWarps; ++w) {
    sum += sBefore[w][lane];
    sum_less += sLess[w][lane];
  }
  if constexpr (kPlans) {
    int64_t end = sum_up_to_lane(own.len);
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) end += sRows[w];
    if (item <= copies) own = plan_copy(params, item, end - own.len, own.len);
  }
  if (is_copy) {
    params.copies[sum] = own;
    const int number = (own_key - item) / static_cast<int>(kMostCounted);
    if (sum == sum_less && number >= 0 && number < seqs) params.firsts[number] = own;
  } else if (item - copies <= seqs) {
    params.groups[item - copies] = sum;
  }
}

__global__ __launch_bounds__(kFollowThreads) void follow_order_kernel(
    const __grid_constant__ GroupCopiesParams params) {
  ptx::griddepcontrol_launch_dependents();
  const int64_t place = blockIdx.x * int64_t{kFollowThreads} + threadIdx.x;
  if (place >= params.num_copies) return;
  const int64_t copy = __ldg(params.order + place);
  const CopyRows own = rows_of_copy(params.taken, copy);
  params.copies[place] = own;
  if (copy < 0 || copy >= params.num_copies) return;
  const int64_t number = __ldg(params.chosen + copy);
  if (number < 0 || number >= params.num_seqs) return;
  if (__ldg(params.groups + number) == place) params.firsts[number] = own;
}

struct SumCopiesLaunch {
  SumCopiesParams params;
  int lanes_log2;
  int64_t tiles;
};

// The rows of the copy with place `place` in order; none at or past `end`.
__device__ __forceinline__ CopyRows load_copy(const CopyRows* copies, int64_t place, int64_t end) {
  if (place >= end) return {0, 0};
  const longlong2 copy = __ldg(reinterpret_cast<const longlong2*>(copies + place));
  return {copy.x, copy.y};
}

// What the lanes of a warp share of a tile: its rows, and how they are spread over lanes.
struct CopyTile {
  int64_t row;  // in its sequence
  int rows;
  int64_t vectors;  // of a row
  int lanes_log2;

  __device__ int first_row() const { return static_cast<int>(threadIdx.x % 32) >> lanes_log2; }
  __device__ int step() const { return 32 >> lanes_log2; }
};

// The rows of the only copy, or zeros where it has none.
template <typename Loaded>
__device__ __forceinline__ void copy_tile(const CopyTile& tile, const Loaded* gCopy,
                                          int64_t copy_rows, int64_t stride, Loaded* gOut) {
  const int lanes = 1 << tile.lanes_log2, step = tile.step();
  for (int64_t vector = threadIdx.x % 32 & (lanes - 1); vector < tile.vectors; vector += lanes) {
#pragma unroll 1
    for (int first = tile.first_row(); first < tile.rows; first += kItems * step) {
      Loaded rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first + i * step;
        rX[i] = Loaded{};
        if (row < tile.rows && row < copy_rows) rX[i] = gCopy[row * stride + vector];
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first + i * step;
        if (row < tile.rows) gOut[row * tile.vectors + vector] = rX[i];
      }
    }
  }
}
// The rows of copies order[group], ..., order[group_end - 1], added in this order; `own` is the
// lane's of the first 32. All lanes stay in the loops, since each hands on the copy that it has
// looked up.
template <typename Element, int kVector>
__device__ __forceinline__ void sum_tile(const SumCopiesParams& params, const CopyTile& tile,
                                         int64_t group, int64_t group_end, CopyRows own,
                                         rows::Raw<Element, kVector>* gOut) {
  using Loaded = rows::Raw<Element, kVector>;
  using Elements = Vector<Element, kVector>;
  const Loaded* gCopies = static_cast<const Loaded*>(params.grad_out);
  const int64_t stride = params.stride / kVector;
  const int lane = threadIdx.x % 32, lanes = 1 << tile.lanes_log2, step = tile.step();
  int64_t loaded = group;
  for (int64_t first_vector = 0; first_vector < tile.vectors; first_vector += lanes) {
    const int64_t vector = first_vector + (lane & (lanes - 1));
    const int rows = vector < tile.vectors ? tile.rows : 0;
#pragma unroll 1
    for (int first = 0; first < tile.rows; first += kPairItems * step) {
      Sum<Element> sum[kPairItems][kVector] = {};
      for (int64_t base = group; base < group_end; base += 32) {
        if (base != loaded) {
          own = load_copy(params.copies, base + lane, group_end);
          loaded = base;
        }
        const int copies = group_end - base < 32 ? static_cast<int>(group_end - base) : 32;
#pragma unroll 1
        for (int copy = 0; copy < copies; copy += 2) {
          Loaded rX[2][kPairItems];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int64_t begin = __shfl_sync(0xffffffffu, own.begin, copy + c) + tile.row;
            const int64_t len = __shfl_sync(0xffffffffu, own.len, copy + c) - tile.row;
            const Loaded* gX = gCopies + begin * stride + vector;
#pragma unroll
            for (int i = 0; i < kPairItems; ++i) {
              const int row = first + tile.first_row() + i * step;
              rX[c][i] = Loaded{};  // also where there is no second copy
              if (row < rows && row < len) rX[c][i] = gX[row * stride];
            }
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 0; i < kPairItems; ++i) {
#pragma unroll
              for (int e = 0; e < kVector; ++e) {
                sum[i][e] += to_sum(reinterpret_cast<const Elements&>(rX[c][i]).elems[e]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kPairItems; ++i) {
        const int row = first + tile.first_row() + i * step;
        if (row >= rows) continue;
        Elements result;
#pragma unroll
        for (int e = 0; e < kVector; ++e) result.elems[e] = from_sum<Element>(sum[i][e]);
        gOut[row * tile.vectors + vector] = reinterpret_cast<const Loaded&>(result);
      }
    }
  }
}

template <typename Element, int kVector>
__global__ __launch_bounds__(kThreads, kSumCtas) void sum_copies_kernel(
    const __grid_constant__ SumCopiesLaunch launch) {
  using Loaded = rows::Raw<Element, kVector>;
  const SumCopiesParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= launch.tiles) return;  // in the last CTA alone
  const JaggedTile found = find_tile<kCopyRows>(params.offsets, index);
  ptx::griddepcontrol_wait();  // for copies and groups
  if (found.row >= found.rows.len) return;
  const int64_t left = found.rows.len - found.row;
  const CopyTile tile{found.row, left < kCopyRows ? static_cast<int>(left) : kCopyRows,
                      (params.columns + kVector - 1) / kVector, launch.lanes_log2};
  int64_t group = 0, group_end = 0;
  CopyRows only{0, 0};
  if (found.seq >= 0) {
    const int64_t num_copies = params.num_copies;
    group = __ldg(params.groups + found.seq);
    group_end = __ldg(params.groups + found.seq + 1);
    const longlong2 first = __ldg(reinterpret_cast<const longlong2*>(params.firsts + found.seq));
    group = group < 0 ? 0 : group;
    group_end = group_end > num_copies ? num_copies : group_end;
    if (group_end > group) only = {first.x, first.y};
  }
  Loaded* gOut = static_cast<Loaded*>(params.out) + (found.rows.begin + found.row) * tile.vectors;
  if (group_end - group <= 1) {
    const int64_t stride = params.stride / kVector;
    copy_tile(tile, static_cast<const Loaded*>(params.grad_out) + (only.begin + found.row) * stride,
              only.len - found.row, stride, gOut);
  } else {
    const CopyRows own = load_copy(params.copies, group + threadIdx.x % 32, group_end);
    sum_tile<Element, kVector>(params, tile, group, group_end, own, gOut);
  }
}

template <typename Element, int kVector>
cudaError_t launch_sum_copies(const SumCopiesParams& params, cudaStream_t stream) {
  const int64_t vectors = (params.columns + kVector - 1) / kVector;
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kCopyRows);
  const SumCopiesLaunch arguments{params, rows::lanes_log2(vectors), tiles};
  return launch_dependent<sum_copies_kernel<Element, kVector>>(
      arguments, {(tiles + kWarps - 1) / kWarps}, kThreads, 0, stream,
      "cuda.jagged_index_select_backward");
}

struct WriteCopiesLaunch {
  WriteCopiesParams params;
  int lanes_log2;
  int64_t tiles, warps;
};

// The rows of a tile of x, read once, to all copies of its sequence; `own` is the lane's of the first
// 32. All lanes stay in the loops, since each hands on the copy that it has looked up.
template <typename Unit>
__device__ __forceinline__ void write_tile(const WriteCopiesParams& params, const CopyTile& tile,
                                           const Unit* gX, int64_t group, int64_t group_end,
                                           CopyRows own) {
  const int lane = threadIdx.x % 32, lanes = 1 << tile.lanes_log2, step = tile.step();
  int64_t loaded = group;
  for (int64_t first_unit = 0; first_unit < tile.vectors; first_unit += lanes) {
    const int64_t unit = first_unit + (lane & (lanes - 1));
    const int rows = unit < tile.vectors ? tile.rows : 0;
#pragma unroll 1
    for (int first = 0; first < tile.rows; first += kItems * step) {
      Unit rX[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = first + tile.first_row() + i * step;
        rX[i] = Unit{};
        if (row < rows) rX[i] = __ldg(gX + row * params.stride + unit);
      }
      for (int64_t base = group; base < group_end; base += 32) {
        if (base != loaded) {
          own = load_copy(params.copies, base + lane, group_end);
          loaded = base;
        }
        const int copies = group_end - base < 32 ? static_cast<int>(group_end - base) : 32;
#pragma unroll 1
        for (int copy = 0; copy < copies; ++copy) {
          const int64_t begin = __shfl_sync(0xffffffffu, own.begin, copy) + tile.row;
          const int64_t len = __shfl_sync(0xffffffffu, own.len, copy) - tile.row;
          Unit* gOut = static_cast<Unit*>(params.out) + begin * tile.vectors + unit;
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const int row = first + tile.first_row() + i * step;
            if (row < rows && row < len) gOut[row * tile.vectors] = rX[i];
          }
        }
      }
    }
  }
}

// Zeros for the rows of the result that no copy has, all behind the last.
template <typename Unit>
__device__ __forceinline__ void fill_tail(const WriteCopiesLaunch& launch, int64_t warp) {
  const WriteCopiesParams& params = launch.params;
  const int64_t units =
      (params.taken.total - clamped_offset(params.taken, params.num_copies)) * params.row_units;
  Unit* gEnd = static_cast<Unit*>(params.out) + params.taken.total * params.row_units;
  for (int64_t unit = warp * 32 + threadIdx.x % 32; unit < units; unit += launch.warps * 32) {
    gEnd[-1 - unit] = Unit{};
  }
}

template <typename Unit, int kTileRows>
__global__ __launch_bounds__(kThreads, kWriteCtas) void write_copies_kernel(
    const __grid_constant__ WriteCopiesLaunch launch) {
  const WriteCopiesParams& params = launch.params;
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  const bool is_tile = index < launch.tiles;
  const JaggedTile found = find_tile<kTileRows>(params.offsets, is_tile ? index : 0);
  ptx::griddepcontrol_wait();  // for copies and groups
  const int64_t left = found.rows.len - found.row;
  if (is_tile && left > 0 && found.seq >= 0) {
    const CopyTile tile{found.row, left < kTileRows ? static_cast<int>(left) : kTileRows,
                        params.row_units, launch.lanes_log2};
    const int64_t num_copies = params.num_copies;
    int64_t group = __ldg(params.groups + found.seq);
    int64_t group_end = __ldg(params.groups + found.seq + 1);
    const longlong2 first = __ldg(reinterpret_cast<const longlong2*>(params.firsts + found.seq));
    group = group < 0 ? 0 : group;
    group_end = group_end > num_copies ? num_copies : group_end;
    const Unit* gX =
        static_cast<const Unit*>(params.x) + (found.rows.begin + found.row) * params.stride;
    if (group_end - group == 1) {
      write_tile(params, tile, gX, group, group_end, {first.x, first.y});
    } else if (group_end > group) {
      const CopyRows own = load_copy(params.copies, group + threadIdx.x % 32, group_end);
      write_tile(params, tile, gX, group, group_end, own);
    }
  }
  fill_tail<Unit>(launch, index);
}

}  // namespace

cudaError_t launch_jagged_index_select_plan(const RangesParams& params, cudaStream_t stream) {
  return rows::launch_ranges(params, stream, "cuda.jagged_index_select_plan");
}

cudaError_t launch_group_copies(const GroupCopiesParams& params, cudaStream_t stream) {
  const int64_t copies = params.num_copies;
  if (params.order != nullptr) {
    if (copies == 0) return cudaSuccess;
    return launch<follow_order_kernel>(params, {(copies + kFollowThreads - 1) / kFollowThreads},
                                       kFollowThreads, 0, stream, nullptr);
  }
  if (copies > kMostCounted || params.num_seqs > kMostCounted) return cudaErrorInvalidValue;
  const Grid grid{(copies + params.num_seqs + 1 + 31) / 32};
  constexpr int kGroupThreads = kGroupWarps * 32;
  return params.planned == nullptr
             ? launch<group_copies_kernel<false>>(params, grid, kGroupThreads, 0, stream, nullptr)
             : launch<group_copies_kernel<true>>(params, grid, kGroupThreads, 0, stream, nullptr);
}

cudaError_t launch_jagged_index_select(const WriteCopiesParams& params, cudaStream_t stream) {
  const auto launch_tiles = [&](auto unit, auto tile_rows) {
    constexpr int kTileRows = decltype(tile_rows)::value;
    const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileRows);
    // At least so many that zeros behind the last copy take few steps.
    const int64_t ctas = (std::max(tiles, params.taken.total / kRows) + kWarps - 1) / kWarps;
    const WriteCopiesLaunch arguments{params, rows::lanes_log2(params.row_units), tiles,
                                      ctas * kWarps};
    return launch_dependent<write_copies_kernel<decltype(unit), kTileRows>>(
        arguments, {ctas}, kThreads, 0, stream, "cuda.jagged_index_select.copies");
  };
  return rows::with_unit(params.unit_bytes, [&](auto unit) {
    return params.row_units * params.unit_bytes <= kNarrowBytes
               ? launch_tiles(unit, std::integral_constant<int, 2 * kCopyRows>{})
               : launch_tiles(unit, std::integral_constant<int, kCopyRows>{});
  });
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
