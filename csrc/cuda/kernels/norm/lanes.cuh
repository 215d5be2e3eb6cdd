// How the lanes of a warp, or of a CTA, share rows of [T, D] tensors in registers, in vectors of 16
// bytes, and add over a row.
//
// A row belongs to 2^lanes_log2 lanes of one warp, which holds as many rows as it has lanes for, or
// to all threads of the CTA. kRows rows at a time, so that loads and shuffles of one row do not wait
// for those of another. Rows past the end and columns past a row are not read and count as zeros.
//
// Shared memory: of a wide row, its sums over the warps, twice: one is written while slower warps
// read the other.
#pragma once

#include "cuda/kernels/layer_norm_mul_dropout.h"
#include "cuda/kernels/prim/element.cuh"

namespace jagged_cuda::norm {

using Params = LayerNormMulDropoutParams;
using BackwardParams = LayerNormMulDropoutBackwardParams;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxVectors = 4 * kThreads;

// How a thread holds its part of a row: kItems vectors, of kRows rows at a time; kWide: the row
// belongs to the CTA. kCtas: resident per SM, that the registers must leave room for.
template <typename Element_, int kItems_, int kRows_, bool kWide_, int kCtas_>
struct Config {
  using Element = Element_;
  static constexpr int kItems = kItems_, kRows = kRows_, kCtas = kCtas_;
  static constexpr bool kWide = kWide_;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
};

// A vector of 16 bytes as it lies in memory. In words: 16-bit elements would take a register each.
struct alignas(16) Packed {
  uint32_t words[4];
};

template <typename Element, int kVector>
__device__ __forceinline__ void unpack_vector(float (&values)[kVector], const Packed& packed) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Element, __half>) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(packed.words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      values[2 * i] = __uint_as_float(packed.words[i] << 16);
      values[2 * i + 1] = __uint_as_float(packed.words[i] & 0xffff0000u);
    } else {
      values[i] = __uint_as_float(packed.words[i]);
    }
  }
}

template <typename Element, int kVector>
__device__ __forceinline__ Packed round_vector(const float (&values)[kVector]) {
  Packed packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 2) {
      packed.words[i] = pack<Element>(values[2 * i], values[2 * i + 1]);
    } else {
      packed.words[i] = __float_as_uint(values[i]);
    }
  }
  return packed;
}

// Where a thread's elements are.
template <typename Config>
struct Place {
  int64_t unit;   // of kRows * step rows
  int64_t units;  // of the grid
  int step;       // rows beside each other
  int row;        // among these
  int column;     // of the first vector
  int apart;      // columns from one vector to the next
  int lanes;      // of a row within a warp

  __device__ __forceinline__ explicit Place(int lanes_log2) {
    if constexpr (Config::kWide) {
      unit = blockIdx.x;
      units = gridDim.x;
      step = 1;
      row = 0;
      column = static_cast<int>(threadIdx.x) * Config::kVector;
      apart = static_cast<int>(blockDim.x) * Config::kVector;
      lanes = 32;
    } else {
      const int lane = threadIdx.x % 32;
      unit = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
      units = gridDim.x * int64_t{kWarps};
      lanes = 1 << lanes_log2;
      step = 32 >> lanes_log2;
      row = lane >> lanes_log2;
      column = (lane & (lanes - 1)) * Config::kVector;
      apart = lanes * Config::kVector;
    }
  }
};

// Sums over the lanes of a row, and over the warps of a wide one. Every thread gets them.
template <bool kWide>
struct RowSums;

template <>
struct RowSums<false> {
  int lanes;
  template <int kCount>
  __device__ __forceinline__ void add(float (&value)[kCount]) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
    }
  }
};

constexpr int kMaxSums = 8;  // at a time

template <>
struct RowSums<true> {
  float (*sSums)[kMaxSums][kWarps];  // [2]
  int turn = 0;
  template <int kCount>
  __device__ __forceinline__ void add(float (&value)[kCount]) {
    static_assert(kCount <= kMaxSums);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sSums[turn][i][warp] = value[i];
    }
    // The sums of all warps are there. The next ones go to the other buffer, which every warp that
    // has come here has read.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i] = sSums[turn][i][0];
      for (int w = 1; w < warps; ++w) value[i] += sSums[turn][i][w];
    }
    turn ^= 1;
  }
};

// A thread's elements in a [T, D] tensor, of one unit of rows after another.
template <typename Config>
struct Cursor {
  using Element = typename Config::Element;
  Element* first;    // of the first row and vector
  int64_t per_row;   // elements from one row of the thread to the next
  int64_t per_unit;  // to the next unit of the thread

  __device__ __forceinline__ Cursor(const void* global, int64_t stride, const Place<Config>& place)
      : per_row(place.step * stride), per_unit(place.units * Config::kRows * per_row) {
    const int64_t row = place.unit * Config::kRows * place.step + place.row;
    first = static_cast<Element*>(const_cast<void*>(global)) + row * stride + place.column;
  }
  __device__ __forceinline__ void advance() { first += per_unit; }
};

// Which of a thread's rows and vectors are there.
template <typename Config>
struct Exists {
  int rows;  // from the thread's first one to the end
  bool columns[Config::kItems];

  __device__ __forceinline__ Exists(const Place<Config>& place, int64_t first_row,
                                    const Params& params) {
    const int64_t left = params.total - first_row;
    rows = left < 0x7fffffff ? static_cast<int>(left) : 0x7fffffff;
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      columns[i] = place.column + i * place.apart < params.columns;
    }
  }
};

template <typename Config>
__device__ __forceinline__ void load_rows(Packed (&rows)[Config::kRows][Config::kItems],
                                          const Cursor<Config>& cursor, const Place<Config>& place,
                                          const Exists<Config>& exists) {
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      rows[r][i] = Packed{};
      if (r * place.step < exists.rows && exists.columns[i]) {
        rows[r][i] =
            *reinterpret_cast<const Packed*>(cursor.first + r * cursor.per_row + i * place.apart);
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void store_vector(const float (&values)[Config::kVector],
                                             const Cursor<Config>& cursor, int r, int i,
                                             const Place<Config>& place,
                                             const Exists<Config>& exists) {
  using Element = typename Config::Element;
  if (r * place.step >= exists.rows || !exists.columns[i]) return;
  *reinterpret_cast<Packed*>(cursor.first + r * cursor.per_row + i * place.apart) =
      round_vector<Element>(values);
}

template <typename Config>
using Values = float[Config::kRows][Config::kItems][Config::kVector];

template <typename Config>
__device__ __forceinline__ void unpack_rows(Values<Config>& values,
                                            const Packed (&rows)[Config::kRows][Config::kItems]) {
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
    for (int i = 0; i < Config::kItems; ++i) {
      unpack_vector<typename Config::Element>(values[r][i], rows[r][i]);
    }
  }
}

}  // namespace jagged_cuda::norm
