// jagged_jagged_bmm where one operand has up to 8 columns, in 16 bit: that many weighted sums of the
// other one's rows, for each sequence b.
//
//   z_b = x_b^T w_b, or w_b^T x_b          x_b [L, C], stride 1 along C;  w_b [L, W], W <= 8
//
// Much is read, little written: what counts is that loads of x start at once and that no sequence is
// long. Sequences are cut into parts (gemm/row_parts.cuh).
//
// Grid: a warp for each unit of parts and each kColumns columns of x, columns first. x goes from
// global memory to registers, 16 bytes in each load, kSteps steps of 16 rows ahead, w likewise by
// elements; neither shared memory nor barriers.
//
//     for 16 rows:   z += x[rows, 64 columns]^T w[rows, :]
//
// Lane 4 g + t of mma's A = x^T [16, 16] has rows of A g and g + 8, terms 2 t, 2 t + 1, 2 t + 8, 2 t +
// 9. Which columns of x are which rows of A is free, and so is which of x's rows are which terms: a
// lane takes 8 columns from 8 g on, of rows t, t + 4, t + 8, t + 12, and product j has columns 8 g + 2
// j and 8 g + 2 j + 1. Then each fragment is a byte permutation of two words that the lane has.
//
// Rows past the part's end and columns that do not exist are not loaded: zeros. An empty sequence
// gives zeros. The sum runs over rows in order: deterministic, and alike in any batch.
#pragma once

#include "cuda/kernels/gemm/row_parts.cuh"
#include "cuda/kernels/jagged_jagged_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ptx.cuh"

namespace jagged_cuda::gemm {

template <typename Element_>
struct WeightedSumsConfig {
  using Element = Element_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kColumns = 64;  // of a warp
  static constexpr int kWeights = 8;
  static constexpr int kSteps = 2;  // of 16 rows, in flight
  static constexpr int kMinCtas = 5;
  static constexpr PathName kPath =
      PathName("cuda.jagged_jagged_bmm.weighted_sums.") + kElementName<Element>;
};

struct WeightedSumsParams {
  const void* x;        // [T, columns], rows of whole 16 bytes
  const void* weights;  // [T, num_weights]
  void* out;            // [B, columns, num_weights], or [B, num_weights, columns] if columns_last
  float* partial;       // [slots, columns num_weights]; null if there are none
  OffsetsView offsets;  // [B + 1]
  RowCuts cuts;
  int x_stride, weights_stride;
  int64_t column_groups;  // of kColumns
  int64_t columns;
  int num_weights;
  bool columns_last;
};

// The 16 rows of a step that a lane multiplies.
struct WeightedStep {
  uint4 x[4];
  uint32_t weights[4];
};

// c[j]: columns 8 g + 2 j (first half) and 8 g + 2 j + 1, sums 2 t and 2 t + 1.
template <typename Element>
__device__ __forceinline__ void multiply_step(float (&c)[4][4], const WeightedStep& step) {
  const uint32_t b0 = __byte_perm(step.weights[0], step.weights[1], 0x5410),
                 b1 = __byte_perm(step.weights[2], step.weights[3], 0x5410);
  const auto product = [&](float (&sums)[4], uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    const uint32_t a[4] = {__byte_perm(x0, x1, 0x5410), __byte_perm(x0, x1, 0x7632),
                           __byte_perm(x2, x3, 0x5410), __byte_perm(x2, x3, 0x7632)};
    ptx::mma_m16n8k16<Element>(sums, a, b0, b1);
  };
  product(c[0], step.x[0].x, step.x[1].x, step.x[2].x, step.x[3].x);
  product(c[1], step.x[0].y, step.x[1].y, step.x[2].y, step.x[3].y);
  product(c[2], step.x[0].z, step.x[1].z, step.x[2].z, step.x[3].z);
  product(c[3], step.x[0].w, step.x[1].w, step.x[2].w, step.x[3].w);
}

// Four words of each lane of a quad: lane t gets word t of all four.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int quad_lane) {
  const bool odd = quad_lane % 2 != 0, high = quad_lane >= 2;
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? words[pair] : words[pair + 1], 1);
    (odd ? words[pair] : words[pair + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = other;
  }
}

// Stores the sums of a sequence, in 16 bit: `gOut` is the sequence's matrix, `column` the first of
// this lane's 8. All lanes together.
template <typename Element>
__device__ __forceinline__ void store_sums(const float (&c)[4][4], Element* gOut,
                                           const WeightedSumsParams& params, int64_t column,
                                           bool exists) {
  const int quad_lane = threadIdx.x % 4, weights = params.num_weights;
  if (params.columns_last || weights == 1) {  // 8 elements in a row for each weight
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int weight = quad_lane * 2 + e;
      if (!exists || weight >= weights) continue;
      ptx::st_global_16(
          gOut + weight * params.columns + column,
          make_uint4(pack<Element>(c[0][e], c[0][2 + e]), pack<Element>(c[1][e], c[1][2 + e]),
                     pack<Element>(c[2][e], c[2][2 + e]), pack<Element>(c[3][e], c[3][2 + e])));
    }
  } else if (weights == 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack<Element>(c[j][2 * half], c[j][2 * half + 1]);
      transpose_quad(words, quad_lane);
      if (exists) {
        ptx::st_global_16(gOut + (column + quad_lane * 2 + half) * 8,
                          make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int weight = quad_lane * 2 + i % 2;
      if (!exists || weight >= weights) continue;
      gOut[(column + i / 2) * weights + weight] =
          from_sum<Element>(c[i / 4][i / 2 % 2 * 2 + i % 2]);
    }
  }
}

// Leaves the sums of a part, in the order of the matrix.
__device__ __forceinline__ void store_partial(const float (&c)[4][4], float* gPartial,
                                              const WeightedSumsParams& params, int64_t column,
                                              bool exists) {
  const int quad_lane = threadIdx.x % 4, weights = params.num_weights;
  if (!exists || quad_lane * 2 >= weights) return;
  if (params.columns_last || weights == 1) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (quad_lane * 2 + e >= weights) break;
      auto* gSums =
          reinterpret_cast<float4*>(gPartial + (quad_lane * 2 + e) * params.columns + column);
      gSums[0] = {c[0][e], c[0][2 + e], c[1][e], c[1][2 + e]};
      gSums[1] = {c[2][e], c[2][2 + e], c[3][e], c[3][2 + e]};
    }
    return;
  }
  float* gSums = gPartial + column * weights + quad_lane * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float first = c[i / 2][i % 2 * 2], second = c[i / 2][i % 2 * 2 + 1];
    if (weights % 2 == 0) {
      *reinterpret_cast<float2*>(gSums + i * weights) = {first, second};
    } else {
      gSums[i * weights] = first;
      if (quad_lane * 2 + 1 < weights) gSums[i * weights + 1] = second;
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void weighted_sums_kernel(
    const __grid_constant__ WeightedSumsParams params) {
  using Element = typename Config::Element;
  constexpr int kSteps = Config::kSteps;
  ptx::griddepcontrol_launch_dependents();
  const int lane = threadIdx.x % 32, quad_lane = lane % 4, quad = lane / 4;
  const uint32_t index = blockIdx.x * Config::kWarps + threadIdx.x / 32,
                 groups = static_cast<uint32_t>(params.column_groups), unit = index / groups;
  const uint32_t slabs = static_cast<uint32_t>(params.cuts.slabs);
  if (unit >= slabs + static_cast<uint32_t>(params.offsets.num_seqs)) return;
  const RowPart part = unit < slabs ? later_part(params.offsets, params.cuts, unit)
                                    : first_part(params.offsets, params.cuts, unit - slabs);
  if (part.seq < 0) return;
  const int64_t column = int64_t{index - unit * groups} * Config::kColumns + quad * 8;
  const bool exists = column < params.columns, weighs = quad < params.num_weights;
  const int64_t first_row = part.begin + quad_lane;
  const Element* gX = static_cast<const Element*>(params.x) + first_row * params.x_stride + column;
  const unsigned short* gWeights =
      static_cast<const unsigned short*>(params.weights) + first_row * params.weights_stride + quad;
  int left = part.rows - quad_lane;  // from the row that is loaded next on
  const auto load = [&](WeightedStep& step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      step.x[i] = ptx::ld_global_nc_16(gX + 4 * i * params.x_stride, exists && 4 * i < left);
      step.weights[i] =
          weighs && 4 * i < left ? __ldg(gWeights + 4 * i * params.weights_stride) : 0;
    }
    gX += 16 * params.x_stride, gWeights += 16 * params.weights_stride, left -= 16;
  };

  float c[4][4] = {};
  WeightedStep steps[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) load(steps[s]);
#pragma unroll 1
  for (int row = 0; row < part.rows; row += 16 * kSteps) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s > 0 && row + 16 * s >= part.rows) break;
      multiply_step<Element>(c, steps[s]);
      load(steps[s]);
    }
  }
  const int64_t elems = params.cuts.elems;
  if (part.slot < 0) {
    store_sums(c, static_cast<Element*>(params.out) + part.seq * elems, params, column, exists);
  } else {
    store_partial(c, params.partial + part.slot * elems, params, column, exists);
  }
}

// Which operand has the rows that are summed, if the product is for this kernel.
enum class WeightedOperand { kNone, kX, kY };

inline WeightedOperand weighted_operand(const JaggedJaggedBmmParams& params) {
  constexpr int64_t kMostColumns = 1 << 20, kMostStride = 1 << 24;
  if (!is_16_bit(params.type) ||
      !RowCuts::is_possible(params.offsets, params.rows * params.columns) ||
      params.x_stride > kMostStride || params.y_stride > kMostStride) {
    return WeightedOperand::kNone;
  }
  const auto serves = [](int64_t columns, bool vectors, int64_t weights) {
    return vectors && columns <= kMostColumns && weights <= 8 && columns >= weights;
  };
  // Of many columns of x several sums are no faster than on the engine, whose tiles are made for them.
  constexpr int64_t kFewColumns = 64;
  if (serves(params.rows, params.x_vectors, params.columns) &&
      (params.columns == 1 || params.rows <= kFewColumns)) {
    return WeightedOperand::kX;
  }
  if (serves(params.columns, params.y_vectors, params.rows)) return WeightedOperand::kY;
  return WeightedOperand::kNone;
}

// More rows: fewer partial sums, and units that only search; fewer: the last part ends earlier.
inline RowCuts weighted_cuts(const JaggedJaggedBmmParams& params) {
  constexpr int kRows = 256;
  return RowCuts(params.offsets, kRows, params.rows * params.columns);
}

inline cudaError_t launch_weighted_sums(const JaggedJaggedBmmParams& params, const RowCuts& cuts,
                                        cudaStream_t stream) {
  const bool of_x = weighted_operand(params) == WeightedOperand::kX;
  const auto with = [&](auto element) {
    using Config = WeightedSumsConfig<decltype(element)>;
    const int64_t columns = of_x ? params.rows : params.columns;
    const int64_t groups = (columns + Config::kColumns - 1) / Config::kColumns;
    const WeightedSumsParams sums{of_x ? params.x : params.y,
                                  of_x ? params.y : params.x,
                                  params.out,
                                  params.partial,
                                  params.offsets,
                                  cuts,
                                  static_cast<int>(of_x ? params.x_stride : params.y_stride),
                                  static_cast<int>(of_x ? params.y_stride : params.x_stride),
                                  groups,
                                  columns,
                                  static_cast<int>(of_x ? params.columns : params.rows),
                                  !of_x};
    const int64_t warps = (cuts.slabs + params.offsets.num_seqs) * groups;
    constexpr int64_t kMostWarps = 0xffffffff - Config::kWarps;  // they are numbered in 32 bits
    if (warps > kMostWarps) return cudaErrorInvalidConfiguration;
    return launch<weighted_sums_kernel<Config>>(sums,
                                                {(warps + Config::kWarps - 1) / Config::kWarps},
                                                Config::kThreads, 0, stream, Config::kPath);
  };
  return params.type == ElementType::kBf16 ? with(__nv_bfloat16{}) : with(__half{});
}

}  // namespace jagged_cuda::gemm
