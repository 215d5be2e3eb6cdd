// The engine of the jagged products: C = A B on tensor cores, for one tile of rows of one sequence.
//
//   C[m, n] = sum_k A[m, k] B[k, n]          A [M, K], B [K, N]; M, N and K may each be ragged
//
// Each operand has stride 1 along K or along its other dimension (Layout) and any stride between. A
// CTA owns kTileM rows of C and walks a range of N in steps of kTileN; kWarpsM x kWarpsN warps
// share a tile of C, each with kFragmentsM x kFragmentsN fragments of 16 x 8. K runs in stages of
// 128 bytes (64 elements of 16 bits, 32 of f32) through a ring of kStages stages of shared memory,
// filled by cp.async kStages - 1 ahead. Lines of 16 bits that begin at any element come as the
// granules that hold them, and are shifted into place when their stage is due (gemm/shifted.cuh).
// The ring runs on across tiles of N: the first loads of the next tile are in flight while the last
// tile is stored.
//
// Shared memory: kStages x (A tile + B tile). A tile is kept in the order of global memory, one
// line for each element of the strided dimension, padded so that fragments are read without bank
// conflicts (Config::line_elems). Bytes of Config<Bf16, Tile<64, 8, ...>>, both along K: 4 x (64 x
// 144 + 8 x 144).
//
// Barriers: one __syncthreads a stage, after each thread has waited for its own copies of that
// stage, and shifted its lines. It publishes the stage to all warps, and it closes the stage before
// it, whose buffer is filled next.
//
// Ragged edges: what lies outside [rows, columns, K] is not read, or, in a granule, masked by the
// shift; zeros take its place, so that neither a neighbour's NaN nor stale shared memory
// reaches a sum. K = 0 gives zeros.
//
// Sums: tensor cores add in f32 but truncate, which drifts over long sums; so each stage is summed
// from zero and then added to the total, rounded to nearest. F32 splits each
// operand into a big and a small TF32 part and sums big * big apart from big * small + small * big.
// An infinite operand turns the second sum into NaN, so it counts only where the first one is
// finite.
#pragma once

#include "cuda/kernels/gemm/shifted.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/ptx.cuh"

#include <cstdint>
#include <type_traits>

namespace jagged_cuda::gemm {

// Which dimension of an operand has stride 1: K, or the other one (M of A, N of B).
enum class Layout { kAlongK, kAcross };

// The arithmetic of a product.
template <typename Element_, int kStepK_, bool kCompensated_>
struct Arithmetic {
  using Element = Element_;
  static constexpr int kStepK = kStepK_;  // of one mma
  static constexpr bool kCompensated = kCompensated_;
};
struct Bf16 : Arithmetic<__nv_bfloat16, 16, false> {
  static constexpr const char* kName = "bf16";
};
struct F16 : Arithmetic<__half, 16, false> {
  static constexpr const char* kName = "f16";
};
struct Tf32 : Arithmetic<float, 8, false> {
  static constexpr const char* kName = "tf32";
};
struct F32 : Arithmetic<float, 8, true> {
  static constexpr const char* kName = "f32";
};

// launch(math) with the arithmetic that `type` names; f64 has kernels of its own.
template <typename Launch>
cudaError_t with_math(ElementType type, Launch launch) {
  switch (type) {
    case ElementType::kBf16:
      return launch(Bf16{});
    case ElementType::kF16:
      return launch(F16{});
    case ElementType::kTf32:
      return launch(Tf32{});
    case ElementType::kF32:
      return launch(F32{});
    case ElementType::kF64:
      break;
  }
  return cudaErrorInvalidValue;
}

template <int kTileM_, int kTileN_, int kWarpsM_, int kWarpsN_, int kStages_>
struct Tile {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_;
};

template <typename Math_, typename Tile, Layout kLayoutA_, Layout kLayoutB_>
struct Config {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr Layout kLayoutA = kLayoutA_, kLayoutB = kLayoutB_;
  static constexpr int kTileM = Tile::kTileM, kTileN = Tile::kTileN;
  static constexpr int kTileK = 128 / sizeof(Element);
  static constexpr int kStages = Tile::kStages;
  static constexpr int kWarpsM = Tile::kWarpsM, kWarpsN = Tile::kWarpsN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpTileM = kTileM / kWarpsM, kWarpTileN = kTileN / kWarpsN;
  static constexpr int kFragmentsM = kWarpTileM / 16, kFragmentsN = kWarpTileN / 8;
  static constexpr int kVectorElems = 16 / sizeof(Element);

  // CTAs per SM that the registers must leave room for: as many as sums allow without spills.
  static constexpr int kSums = kFragmentsM * kFragmentsN * 4 * (Math::kCompensated ? 3 : 2);
  static constexpr int kMinCtas = (kSums >= 96 ? 3 : kSums > 16 ? 4 : 5) * 128 / kThreads;

  static_assert(kMinCtas >= 1);
  static_assert(kTileM % (16 * kWarpsM) == 0 && kTileN % (8 * kWarpsN) == 0);
  static_assert(kFragmentsN == 1 || kFragmentsN % 2 == 0, "B fragments are loaded two at a time");
  static_assert(kTileK % Math::kStepK == 0 && kStages >= 2);

  // Elements from one line of a tile in shared memory to the next. ldmatrix reads 8 lines of 16
  // bytes: free of conflicts if a line is an odd number of 16-byte units. f32 across K is read as
  // single words, 4 lines x 8 words: free if a line is 8 words more than a multiple of 16 words.
  static constexpr int line_elems(Layout layout, int across) {
    if (layout == Layout::kAlongK) return kTileK + kVectorElems;
    if (sizeof(Element) == 2) return across / 8 % 2 == 1 ? across : across + 8;
    return across % 16 == 8 ? across : across + 8;
  }
  static constexpr int kLinesA = kLayoutA == Layout::kAlongK ? kTileM : kTileK;
  static constexpr int kLinesB = kLayoutB == Layout::kAlongK ? kTileN : kTileK;
  static constexpr int kLineA = line_elems(kLayoutA, kTileM);
  static constexpr int kLineB = line_elems(kLayoutB, kTileN);
};

template <typename Config>
struct Stage {
  alignas(128) typename Config::Element sA[Config::kLinesA * Config::kLineA];
  alignas(128) typename Config::Element sB[Config::kLinesB * Config::kLineB];
};

template <typename Config>
struct SharedStorage {
  Stage<Config> stages[Config::kStages];
};

// The dynamic shared memory of the CTA.
template <typename Storage>
__device__ __forceinline__ Storage& shared_memory() {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  return *reinterpret_cast<Storage*>(shared_bytes);
}

template <typename Config>
__device__ __forceinline__ SharedStorage<Config>& shared_storage() {
  return shared_memory<SharedStorage<Config>>();
}

// An operand of one product.
template <typename Element>
struct Operand {
  static constexpr bool kUnaligned = false;
  const Element* data;  // element (0, 0): A [rows of the tile, K], B [K, N]
  int64_t stride;       // elements from one line to the next; along a line the stride is 1
  bool vectors;         // data is 16-byte aligned, and stride and lines are multiples of 16 bytes
};

// One whose lines are as a rule not aligned.
template <typename Element>
struct UnalignedOperand : Operand<Element> {
  static constexpr bool kUnaligned = true;
  Extent tensor;  // around it
  bool at_edge;   // the 16-byte granules that hold its elements reach out of the tensor
};

// ---- Loading -----------------------------------------------------------------------------------

// Copies lines x elems of the tile at `global` into shared memory, and zeros into the rest of it.
// No more is read than what exists: a copy of 0 bytes does not look at its source.
template <int kThreads, int kLines, int kElems, int kLine, typename Operand, typename Element>
__device__ __forceinline__ void load_tile(Element* sTile, const Operand& operand,
                                          const Element* global, int lines, int elems) {
  if (operand.vectors) {
    constexpr int kVector = 16 / sizeof(Element), kVectors = kElems / kVector;
    constexpr int kLineStep = kThreads / kVectors;
    static_assert(kElems % kVector == 0 && kThreads % kVectors == 0 && kLine % kVector == 0);
    const int first = threadIdx.x / kVectors, elem = threadIdx.x % kVectors * kVector;
    const int bytes = elem < elems ? 16 : 0;  // a line is whole vectors
    const Element* source = global + first * operand.stride + elem;
#pragma unroll
    for (int step = 0; step < kLines; step += kLineStep) {
      const int line = first + step;
      if (kLines % kLineStep != 0 && line >= kLines) break;
      ptx::cp_async_16(&sTile[line * kLine + elem], source, line < lines ? bytes : 0);
      source += kLineStep * operand.stride;
    }
  } else if constexpr (Operand::kUnaligned && sizeof(Element) == 4) {
    constexpr int kLineStep = kThreads / kElems;
    static_assert(kThreads % kElems == 0 && kLines % kLineStep == 0);
    const int first = threadIdx.x / kElems, elem = threadIdx.x % kElems;
    const Element* source = global + first * operand.stride + elem;
#pragma unroll
    for (int step = 0; step < kLines; step += kLineStep) {
      const bool exists = first + step < lines && elem < elems;
      ptx::cp_async_4(&sTile[(first + step) * kLine + elem], source, exists ? 4 : 0);
      source += kLineStep * operand.stride;
    }
  } else {
    constexpr int kUnroll = sizeof(Element) == 4 ? 1 : 4;  // loads in flight, if not asynchronous
#pragma unroll kUnroll
    for (int copy = threadIdx.x; copy < kLines * kElems; copy += kThreads) {
      const int line = copy / kElems, elem = copy % kElems;
      const bool exists = line < lines && elem < elems;
      const Element* source = global + line * operand.stride + elem;
      if constexpr (sizeof(Element) == 4) {
        ptx::cp_async_4(&sTile[line * kLine + elem], source, exists ? 4 : 0);
      } else {  // cp.async copies no less than 4 bytes
        sTile[line * kLine + elem] = exists ? *source : Element(0.0f);
      }
    }
  }
}

__device__ __forceinline__ int clamp_extent(int64_t left, int tile) {
  return left < tile ? static_cast<int>(left) : tile;
}

// ---- Fragments ---------------------------------------------------------------------------------

// A [16, kStepK] at (row, k) of the tile: lane l holds rows l / 4 and l / 4 + 8.
template <typename Config>
__device__ __forceinline__ void load_fragment_a(uint32_t (&r)[4],
                                                const typename Config::Element* sA, int row,
                                                int k) {
  constexpr int kLine = Config::kLineA;
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kLayoutA == Layout::kAlongK) {
    ptx::ldmatrix_x4(r, &sA[(row + lane % 16) * kLine + k + lane / 16 * Config::kVectorElems]);
  } else if constexpr (sizeof(typename Config::Element) == 2) {
    const int line = k + lane / 16 * 8 + lane % 8;
    ptx::ldmatrix_x4_trans(r, &sA[line * kLine + row + lane / 8 % 2 * 8]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = __float_as_uint(sA[(k + lane % 4 + i / 2 * 4) * kLine + row + lane / 4 + i % 2 * 8]);
    }
  }
}

// B [kStepK, 8 kCount] at (k, column): two registers for each 8 columns.
template <typename Config, int kCount>
__device__ __forceinline__ void load_fragments_b(uint32_t (&r)[kCount][2],
                                                 const typename Config::Element* sB, int k,
                                                 int column) {
  constexpr int kLine = Config::kLineB;
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kLayoutB == Layout::kAcross && sizeof(typename Config::Element) == 4) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        r[j][i] = __float_as_uint(sB[(k + lane % 4 + i * 4) * kLine + column + j * 8 + lane / 4]);
      }
    }
  } else if constexpr (kCount == 1) {
    if constexpr (Config::kLayoutB == Layout::kAlongK) {
      const int elem = k + lane / 8 % 2 * Config::kVectorElems;
      ptx::ldmatrix_x2(r[0], &sB[(column + lane % 8) * kLine + elem]);
    } else {
      ptx::ldmatrix_x2_trans(r[0], &sB[(k + lane % 16) * kLine + column]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      uint32_t both[4];
      if constexpr (Config::kLayoutB == Layout::kAlongK) {
        const int line = column + j * 8 + lane / 16 * 8 + lane % 8;
        ptx::ldmatrix_x4(both, &sB[line * kLine + k + lane / 8 % 2 * Config::kVectorElems]);
      } else {
        const int line = k + lane % 16;
        ptx::ldmatrix_x4_trans(both, &sB[line * kLine + column + j * 8 + lane / 16 * 8]);
      }
      r[j][0] = both[0], r[j][1] = both[1], r[j + 1][0] = both[2], r[j + 1][1] = both[3];
    }
  }
}

// Rounds an f32 register to TF32; with kCompensated returns what the rounding left. That has 12
// significant bits, of which the product reads 11: it need not be rounded. Adding half a unit to
// the bits takes 3 instructions where cvt.rna takes 4 for each part, but may make a NaN a zero:
// what is left is a NaN then.
template <bool kCompensated>
__device__ __forceinline__ uint32_t split_tf32(uint32_t& value) {
  const float whole = __uint_as_float(value);
  if constexpr (!kCompensated) {
    value = ptx::cvt_rna_tf32(whole);
    return 0;
  }
  value = (value + 0x1000) & ~0x1fffu;
  return __float_as_uint(whole - __uint_as_float(value));
}

// ---- Products ----------------------------------------------------------------------------------

// What one warp holds of C. Element i of a fragment is row lane / 4 + 8 (i / 2), column
// 2 (lane % 4) + i % 2.
template <typename Config>
struct Accumulator {
  static constexpr int kSmallM = Config::Math::kCompensated ? Config::kFragmentsM : 1;
  static constexpr int kSmallN = Config::Math::kCompensated ? Config::kFragmentsN : 1;

  float total[Config::kFragmentsM][Config::kFragmentsN][4];
  float small[kSmallM][kSmallN][4];  // big * small + small * big, of F32 alone

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) total[i][j][e] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kSmallM; ++i) {
#pragma unroll
      for (int j = 0; j < kSmallN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) small[i][j][e] = 0.0f;
      }
    }
  }

  // From now on total has the finished sums.
  __device__ __forceinline__ void finish() {
    if constexpr (Config::Math::kCompensated) {
#pragma unroll
      for (int n = 0; n < Config::kFragmentsM * Config::kFragmentsN * 4; ++n) {
        const int i = n / (Config::kFragmentsN * 4), j = n / 4 % Config::kFragmentsN;
        total[i][j][n % 4] = value(i, j, n % 4);
        small[i][j][n % 4] = 0.0f;
      }
    }
  }

  // Moves the totals of each block of columns to the place before it, and the first to the end.
  __device__ __forceinline__ void rotate() {
#pragma unroll
    for (int n = 0; n < Config::kFragmentsM * 4; ++n) {
      const int i = n / 4, e = n % 4;
      const float first = total[i][0][e];
#pragma unroll
      for (int j = 0; j + 1 < Config::kFragmentsN; ++j) total[i][j][e] = total[i][j + 1][e];
      total[i][Config::kFragmentsN - 1][e] = first;
    }
  }

  // The finished sum.
  __device__ __forceinline__ float value(int i, int j, int e) const {
    if constexpr (Config::Math::kCompensated) {
      const float big = total[i][j][e];
      return isfinite(big) ? big + small[i][j][e] : big;
    } else {
      return total[i][j][e];
    }
  }
};

// Adds the product of one step of K, at element k of the stage. (row, column) is the warp's corner
// of the tile.
template <typename Config>
__device__ __forceinline__ void multiply_step(
    float (&rStage)[Config::kFragmentsM][Config::kFragmentsN][4], Accumulator<Config>& rAcc,
    const Stage<Config>& stage, int row, int column, int k) {
  using Math = typename Config::Math;
  constexpr int kFragmentsM = Config::kFragmentsM, kFragmentsN = Config::kFragmentsN;
  uint32_t rA[kFragmentsM][4], rB[kFragmentsN][2];
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
    load_fragment_a<Config>(rA[i], stage.sA, row + 16 * i, k);
  }
  load_fragments_b<Config, kFragmentsN>(rB, stage.sB, k, column);
  if constexpr (Math::kStepK == 16) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        ptx::mma_m16n8k16<typename Config::Element>(rStage[i][j], rA[i], rB[j][0], rB[j][1]);
      }
    }
  } else {
    uint32_t rSmallA[kFragmentsM][4], rSmallB[kFragmentsN][2];
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rSmallA[i][e] = split_tf32<Math::kCompensated>(rA[i][e]);
      }
    }
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rSmallB[j][e] = split_tf32<Math::kCompensated>(rB[j][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        ptx::mma_m16n8k8_tf32(rStage[i][j], rA[i], rB[j][0], rB[j][1]);
        if constexpr (Math::kCompensated) {
          ptx::mma_m16n8k8_tf32(rAcc.small[i][j], rA[i], rSmallB[j][0], rSmallB[j][1]);
          ptx::mma_m16n8k8_tf32(rAcc.small[i][j], rSmallA[i], rB[j][0], rB[j][1]);
        }
      }
    }
  }
}

// Adds the product of one stage, of which `depth` elements of K exist: steps beyond them are zeros.
template <typename Config>
__device__ __forceinline__ void multiply_stage(Accumulator<Config>& rAcc,
                                               const Stage<Config>& stage, int row, int column,
                                               int depth) {
  constexpr int kFragmentsM = Config::kFragmentsM, kFragmentsN = Config::kFragmentsN;
  constexpr int kTileK = Config::kTileK, kStepK = Config::Math::kStepK;
  float rStage[kFragmentsM][kFragmentsN][4] = {};
  if (depth > kTileK / 2) {
#pragma unroll
    for (int k = 0; k < kTileK; k += kStepK) {
      multiply_step<Config>(rStage, rAcc, stage, row, column, k);
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < depth; k += kStepK) {
      multiply_step<Config>(rStage, rAcc, stage, row, column, k);
    }
  }
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rAcc.total[i][j][e] += rStage[i][j][e];
    }
  }
}

// ---- Storing -----------------------------------------------------------------------------------

// kCount neighbouring elements of which `exist` lie inside the result. With `vectors` the address
// is a multiple of kCount elements, and either all or none exist.
template <int kCount, typename Element>
__device__ __forceinline__ void store_elements(Element* global, const float (&r)[kCount], int exist,
                                               bool vectors) {
  static_assert(kCount == 2 || kCount == 4);
  if (vectors) {
    if (exist < kCount) return;
    if constexpr (sizeof(Element) == 4) {
      if constexpr (kCount == 4) {
        *reinterpret_cast<float4*>(global) = make_float4(r[0], r[1], r[2], r[3]);
      } else {
        *reinterpret_cast<float2*>(global) = make_float2(r[0], r[1]);
      }
    } else if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(global) =
          make_uint2(pack<Element>(r[0], r[1]), pack<Element>(r[2], r[3]));
    } else {
      *reinterpret_cast<uint32_t*>(global) = pack<Element>(r[0], r[1]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (e < exist) global[e] = from_sum<Element>(r[e]);
    }
  }
}

// Stores a warp's part of C, at (row, column) of the tile whose corner is `global`, [rows, columns]
// of which exist. With two or more fragments beside each other, the lanes of a pair swap halves, so
// that each holds 4 neighbouring columns. `stride` must be a multiple of that count, and `global`
// aligned to it, for stores to be vectors.
template <typename Config>
__device__ __forceinline__ void store_tile(const Accumulator<Config>& rAcc,
                                           typename Config::Element* global, int64_t stride,
                                           int row, int column, int rows, int columns) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < Config::kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = row + 16 * i + lane / 4 + 8 * half;
      typename Config::Element* gLine = global + line * stride;
      if constexpr (Config::kFragmentsN == 1) {
        const float r[2] = {rAcc.value(i, 0, 2 * half), rAcc.value(i, 0, 2 * half + 1)};
        const int elem = column + 2 * quad;
        if (line < rows) store_elements<2>(gLine + elem, r, columns - elem, stride % 2 == 0);
      } else {
#pragma unroll
        for (int j = 0; j < Config::kFragmentsN; j += 2) {
          const float left[2] = {rAcc.value(i, j, 2 * half), rAcc.value(i, j, 2 * half + 1)};
          const float right[2] = {rAcc.value(i, j + 1, 2 * half),
                                  rAcc.value(i, j + 1, 2 * half + 1)};
          const bool odd = quad % 2 == 1;
          const float got0 = __shfl_xor_sync(0xffffffffu, odd ? left[0] : right[0], 1);
          const float got1 = __shfl_xor_sync(0xffffffffu, odd ? left[1] : right[1], 1);
          const float r[4] = {odd ? got0 : left[0], odd ? got1 : left[1], odd ? right[0] : got0,
                              odd ? right[1] : got1};
          const int elem = column + 8 * j + (odd ? 8 + 2 * (quad - 1) : 2 * quad);
          if (line < rows) store_elements<4>(gLine + elem, r, columns - elem, stride % 4 == 0);
        }
      }
    }
  }
}

// ---- The product -------------------------------------------------------------------------------

// C rows [0, rows) of this tile x columns [begin, end): calls store(rAcc, row, column, n) for each
// tile of N at n, with the warp's corner (row, column) in the tile. All threads of the CTA call it
// together.
template <typename Config, typename OperandA, typename OperandB, typename Store>
__device__ __forceinline__ void multiply(SharedStorage<Config>& shared, const OperandA& a,
                                         const OperandB& b, int rows, int64_t begin, int64_t end,
                                         int64_t depth, Store store) {
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
  constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  const int warp = threadIdx.x / 32;
  const int row = warp % Config::kWarpsM * Config::kWarpTileM;
  const int column = warp / Config::kWarpsM * Config::kWarpTileN;

  using Element = typename Config::Element;
  constexpr bool kAlongK = Config::kLayoutA == Layout::kAlongK;
  constexpr int kLinesA = Config::kLinesA, kElemsA = kAlongK ? kTileK : kTileM;
  constexpr bool kShifts = OperandA::kUnaligned && sizeof(Element) == 2;
  using Shifted = ShiftedTile<kThreads, kLinesA, kElemsA, Config::kLineA, Element>;
  int64_t load_n = begin, load_k = 0;
  const auto start_next = [&](Stage<Config>& stage) {
    if (load_n < end) {
      const int depth_left = clamp_extent(depth - load_k, kTileK);
      const int columns_left = clamp_extent(end - load_n, kTileN);
      const Element* gA = a.data + (kAlongK ? load_k : load_k * a.stride);
      const int lines = kAlongK ? rows : depth_left, elems = kAlongK ? depth_left : rows;
      bool copied = false;
      if constexpr (kShifts) {
        if (!a.vectors) {
          Shifted::copy(stage.sA, gA, a.stride, lines, elems, a.at_edge, a.tensor);
          copied = true;
        }
      }
      if (!copied) {
        load_tile<kThreads, kLinesA, kElemsA, Config::kLineA>(stage.sA, a, gA, lines, elems);
      }
      if constexpr (Config::kLayoutB == Layout::kAlongK) {
        load_tile<kThreads, kTileN, kTileK, Config::kLineB>(
            stage.sB, b, b.data + load_n * b.stride + load_k, columns_left, depth_left);
      } else {
        load_tile<kThreads, kTileK, kTileN, Config::kLineB>(
            stage.sB, b, b.data + load_k * b.stride + load_n, depth_left, columns_left);
      }
      load_k += kTileK;
      if (load_k >= depth) load_k = 0, load_n += kTileN;
    }
    ptx::cp_async_commit();  // an empty group too, so that groups and stages stay in step
  };

#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    start_next(shared.stages[s]);
  }
  int current = 0;
  for (int64_t n = begin; n < end; n += kTileN) {
    const bool at_work = row < rows && column < end - n;
    Accumulator<Config> rAcc;
    rAcc.clear();
    for (int64_t k = 0; k == 0 || k < depth; k += kTileK) {
      ptx::cp_async_wait<kStages - 2>();
      Stage<Config>& stage = shared.stages[current];
      if constexpr (kShifts) {
        const int depth_left = clamp_extent(depth - k, kTileK);
        // A multiple of kTileK lines or elements moves no address within its granule.
        if (!a.vectors) {
          Shifted::shift_in_place(stage.sA, a.data, a.stride, kAlongK ? rows : depth_left,
                                  kAlongK ? depth_left : rows);
        }
      }
      __syncthreads();  // this stage is there for all; the stage before it is free
      start_next(shared.stages[current == 0 ? kStages - 1 : current - 1]);
      if (at_work) {
        multiply_stage<Config>(rAcc, stage, row, column, clamp_extent(depth - k, kTileK));
      }
      current = current == kStages - 1 ? 0 : current + 1;
    }
    if (at_work) store(rAcc, row, column, n);
  }
}

// How many CTAs share the columns of one tile of rows: one walks them all, as long as there are
// CTAs enough for every SM.
struct ColumnSplit {
  int64_t columns_each;  // a multiple of the tile
  int64_t parts;
};

inline ColumnSplit split_columns(int64_t columns, int tile_columns, int64_t row_tiles) {
  constexpr int64_t kWantedCtas = 1024;  // about 8 for each of 132 SMs
  const int64_t tiles = columns > 0 ? (columns + tile_columns - 1) / tile_columns : 1;
  int64_t parts = (kWantedCtas + row_tiles - 1) / (row_tiles > 0 ? row_tiles : 1);
  parts = parts < tiles ? parts : tiles;
  const int64_t each = (tiles + parts - 1) / parts;
  return {each * tile_columns, (tiles + each - 1) / each};
}

}  // namespace jagged_cuda::gemm
