// array_jagged_bmm_jagged_out of f32 on wgmma and TMA (compute capability 9.0): z_b = A_b y_b, or
// A_b^T y_b, for each sequence b; rounded to TF32, or as three products of TF32; f32 sums.
//
// TF32 operands in shared memory must have stride 1 along K. A_b has, or gets it on its way there;
// y has not, but an operand in registers may come from anywhere. So the product is computed
// transposed: z_b^T = y_b^T A_b^T, with y_b^T [N, K] from registers and A_b^T [K, M] from shared
// memory.
//
// Grid: one CTA for each virtual tile of kTileM rows of the result (prim/jagged.cuh) and kTileN of
// its columns, those of one tile beside each other. Each warp has 16 kBands of the columns for all
// rows: kBands products for its warpgroup. The sum runs over K in order, kStepK at a time:
// deterministic, and alike in any batch. Tensor cores truncate as they add: every kDepth of K the
// sum is added to a rounded one (LongSum).
//
// y comes by TMA, which rounds it to TF32 if that is all, in boxes of 32 columns, of one warp or
// two. A_b begins at any element and has any pitch: it comes by copies of single elements, kAhead
// steps ahead, to where the product wants it, and each thread rounds or splits there what it has
// copied.
//
//     for each step i:   wait for own copies of A_i, round or split them
//                        wait for y_i and for the product of step i - 1
//                        load y_i into registers; what lies past the end becomes zeros
//                        __syncthreads
//                        start the product of step i
//                        start the copies of A_{i + kAhead}, and of y into the slot that was read last
//
// Registers hold the fragments of kStepK / kParts of K: where that is half a step, the second half
// is loaded when the product of the first is done.
//
// F32: the products of a big and a small part have a sum of their own: an infinite operand makes it
// NaN, so it counts only where the first sum is finite.
//
// The terms of a sum may come in any order that both operands have: of eight neighbours of K those
// at even places come first. So may the columns: a lane has neighbours, of which it loads two at
// once and stores all. Of four, the first band has the first two or the last two, so that the loads
// of y from shared memory, four rows of 16 bytes for 16 lanes, use all banks.
//
// Shared memory: for each box kSlots slots of y [kStepK, 32]; kAhead + 1 times A [kTileM, kStepK],
// F32 two for small parts besides.
//
// Barriers: full[box][slot], on which the bytes of y complete; one lane arrives. One __syncthreads
// a step: A_i has been written, y_{i - 1} has been read, and all have seen the product before end,
// whose A is written next.
//
// Virtual tiles without rows return at once. Rows outside every sequence, and those of a matrix
// without columns, take no step: zeros. A matrix that does not fit is not read, and counts as
// zeros. A tile ends with its sequence, and its copies and stores are predicated. A copy of y may
// reach into the next sequence.
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/gemm/long_sum.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Math_, bool kTranspose_, int kTileM_, int kWarps_, int kSlots_, int kAhead_,
          int kMinCtas_, int kParts_>
struct ArrayF32Config {
  using Math = Math_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kTileM = kTileM_;  // rows of the result
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kBands = Math::kCompensated ? 1 : 2;  // of 16 columns, for each warp
  static constexpr int kTileN = 16 * kBands * kWarps;
  static constexpr int kStepK = 32;
  static constexpr int kSlots = kSlots_;  // of y
  static constexpr int kAhead = kAhead_;  // steps of A in flight
  static constexpr int kMinCtas = kMinCtas_;
  static constexpr int kParts = kParts_;  // of a step
  static constexpr int kBlocks = kTileM / 8;
  static constexpr int kElems = kTileM * kStepK / kThreads;  // of A in each thread
  static constexpr int kDepth = Math::kCompensated ? 128 : kSumDepth;
  static_assert(kWarps == 4 || kWarps == 8);
};

template <typename Config>
struct ArrayF32Storage {
  static constexpr int kBoxColumns = 32;
  using YBox = WarpgroupTile<float, Config::kStepK, kBoxColumns>;
  using ATile = WarpgroupTile<float, Config::kTileM, Config::kStepK>;
  static constexpr int kSlotsA = Config::kAhead + 1;
  static constexpr int kSmallTiles = Config::Math::kCompensated ? 2 : 0;

  static constexpr int kBoxes = Config::kTileN / kBoxColumns;

  YBox sY[kBoxes][Config::kSlots];
  ATile sA[kSlotsA + kSmallTiles];
  uint64_t full[kBoxes][Config::kSlots];
  // Of the tile, for the end: kept out of registers.
  struct {
    int64_t row;
    int rows;
  } target[Config::kWarps];
};

struct ArrayF32Params {
  CUtensorMap y;  // boxes of kStepK rows and 32 columns
  ArrayJaggedBmmJaggedOutParams product;
  int column_tiles;  // of a tile of rows in the grid
};

template <typename Config>
class ArrayPart {
  using Storage = ArrayF32Storage<Config>;
  using ATile = typename Storage::ATile;
  static constexpr bool kTranspose = Config::kTranspose;
  static constexpr int kWarps = Config::kWarps, kRuns = Config::kTileM / 8;

 public:
  __device__ __forceinline__ ArrayPart(Storage& shared, const float* gA, int line, int tile_rows)
      : pitch_(line) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = kTranspose ? lane % 8 : warp;
    k_ = kTranspose ? warp / 2 * 8 + lane / 8 * 2 + warp % 2 : lane;
    rows_ = tile_rows - row;
    global_ = gA + (kTranspose ? int64_t{k_} * line + row : int64_t{row} * line + k_);
    shared_ = ptx::shared_address(shared.sA[0].chunk(row, k_ / 8 * 2 + k_ % 2)) +
              k_ % 8 / 2 * sizeof(float);
  }

  // Starts the copies of a step into a slot; `exist` places along K are there, the others are zeros.
  __device__ __forceinline__ void start(int step, int slot, int exist) const {
    const uint32_t tile = shared_ + slot * sizeof(ATile);
    const float* source =
        global_ + int64_t{step} * (kTranspose ? Config::kStepK * int64_t{pitch_} : Config::kStepK);
    if constexpr (!kTranspose) {
      const int left = k_ < exist ? rows_ : 0;
#pragma unroll
      for (int i = 0; i < Config::kElems; ++i) {
        ptx::cp_async_4(place(tile, i), source + int64_t{pitch_} * (kWarps * i),
                        kWarps * i < left ? 4 : 0);
      }
    } else {
#pragma unroll
      for (int set = 0; set < Config::kElems / kRuns; ++set) {
        const int left = k_ + 16 * set < exist ? rows_ : 0;
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
          ptx::cp_async_4(place(tile, set * kRuns + i), source + 8 * i, 8 * i < left ? 4 : 0);
        }
        source += 16 * int64_t{pitch_};
      }
    }
  }

  // Rounds what this thread has copied, in place; small parts go to a slot behind the others.
  __device__ __forceinline__ void round(int slot, int small_slot) const {
    constexpr bool kSplit = Config::Math::kCompensated;
    const uint32_t tile = shared_ + slot * sizeof(ATile);
    uint32_t values[Config::kElems];
#pragma unroll
    for (int i = 0; i < Config::kElems; ++i) values[i] = ptx::ld_shared_4(place(tile, i));
#pragma unroll
    for (int i = 0; i < Config::kElems; ++i) {
      const uint32_t small = split_tf32<kSplit>(values[i]);
      ptx::st_shared_4(place(tile, i), values[i]);
      if constexpr (kSplit) {
        const uint32_t small_tile = shared_ + (Storage::kSlotsA + small_slot) * sizeof(ATile);
        ptx::st_shared_4(place(small_tile, i), small);
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t place(uint32_t tile, int i) {
    if constexpr (kTranspose) return (tile ^ (i / kRuns * 64)) + i % kRuns * 1024;
    if constexpr (kWarps == 8) return tile + i * 1024;
    return (tile ^ (i % 2 * 64)) + i * 512;
  }

  const float* global_;
  int pitch_, k_, rows_;  // rows_: from its first element on
  uint32_t shared_;
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void array_jagged_bmm_jagged_out_f32_wgmma(
    const __grid_constant__ ArrayF32Params launch) {
  using Storage = ArrayF32Storage<Config>;
  using YBox = typename Storage::YBox;
  using ATile = typename Storage::ATile;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStepK = Config::kStepK;
  constexpr int kSlots = Config::kSlots, kBlocks = Config::kBlocks, kBands = Config::kBands;
  constexpr bool kTranspose = Config::kTranspose, kSplit = Config::Math::kCompensated;
  constexpr int kProductK = 8, kProducts = kStepK / kProductK / Config::kParts;
  extern __shared__ __align__(1024) char array_f32_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(array_f32_shared_bytes);
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  const MatricesView& matrices = params.matrices;
  start_overlapping();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The box of this warp's columns, alone or with the next warp, of which the first one copies.
  const int box = warp * kBands / 2;
  const bool copies = lane == 0 && warp * kBands % 2 == 0;

  if (copies) {
    if (warp == 0) ptx::prefetch_tensormap(launch.y);
    for (int slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(shared.full[box][slot], 1);
    ptx::fence_mbarrier_init();
  }
  const uint32_t row_tile =
      launch.column_tiles == 1 ? blockIdx.x : blockIdx.x / launch.column_tiles;
  const JaggedTile tile =
      find_tile_narrow<kTileM>(kTranspose ? matrices.columns : matrices.rows, row_tile);
  if (tile.row >= tile.rows.len) return;
  const int rows = clamp_extent(tile.rows.len - tile.row, kTileM);
  const int tile_column = static_cast<int>(blockIdx.x - row_tile * launch.column_tiles) * kTileN;
  const int box_column = tile_column + box * Storage::kBoxColumns;
  const bool has_columns = box_column < params.columns;

  // Copies of y do not wait for the matrix: if it does not fit, nothing of them counts.
  RowRange summed{0, 0};
  int64_t begin = 0;
  if (tile.seq >= 0) {
    begin = __ldg(reinterpret_cast<const long long*>(matrices.offsets) + tile.seq);
    const bool is_square = matrices.columns.data == matrices.rows.data &&
                           matrices.columns.total == matrices.rows.total;
    summed = is_square ? tile.rows
                       : sequence_rows(kTranspose ? matrices.rows : matrices.columns, tile.seq);
  }
  const int y_row = static_cast<int>(summed.begin);
  const int steps = static_cast<int>((summed.len + kStepK - 1) / kStepK);
  const auto start_copy = [&](int step) {
    if (step >= steps || !has_columns) return;
    const int slot = step % kSlots;
    ptx::mbarrier_arrive_expect_tx(shared.full[box][slot], sizeof(YBox));
    ptx::cp_async_bulk_tensor_3d(shared.sY[box][slot].data, launch.y, box_column, 0,
                                 y_row + step * kStepK, shared.full[box][slot]);
  };
  if (lane == 0) shared.target[warp] = {tile.rows.begin + tile.row, rows};
  if (copies) {
    for (int step = 0; step < kSlots; ++step) start_copy(step);
  }

  const int pitch = static_cast<int>(kTranspose ? tile.rows.len : summed.len);
  const bool fits = begin >= 0 && begin <= matrices.capacity &&
                    tile.rows.len * summed.len <= matrices.capacity - begin;
  const int depth = fits ? static_cast<int>(summed.len) : 0;
  const float* gA = static_cast<const float*>(params.a) + begin +
                    (kTranspose ? tile.row : tile.row * int64_t{pitch});
  const ArrayPart<Config> a(shared, gA, pitch, rows);
  // Of this lane's columns, kBands pairs, the first band has pair `first_pair`.
  const int lane_column = warp * kBands * 16 % Storage::kBoxColumns + lane / 4 * 2 * kBands;
  const int first_pair = kBands == 1 ? 0 : lane / 8 % 2;
  // Register i of y^T [16, 8] has row 2 (lane % 4) + i / 2.
  uint32_t y_address[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    y_address[i] = ptx::shared_address(shared.sY[box][0].chunk(lane % 4 * 2 + i, lane_column / 4)) +
                   (lane_column % 4 + 2 * first_pair) * sizeof(float);
  }
#pragma unroll
  for (int step = 0; step < Config::kAhead; ++step) {
    if (step < steps) a.start(step, step, depth - step * kStepK);
    ptx::cp_async_commit();
  }
  __syncthreads();  // the barriers are initialised

  float sum[kBands][kBlocks][4] = {};
  [[maybe_unused]] float small_sum[kSplit ? kBlocks : 1][4] = {};
  static_assert(!kSplit || kBands == 1);
  LongSum<kBlocks> long_sums[kBands];
  int a_slot = 0, next_slot = Config::kAhead;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int slot = step % kSlots, exist = depth - step * kStepK;
    ptx::cp_async_wait<Config::kAhead - 1>();
    a.round(a_slot, step % 2);
    if (has_columns) ptx::mbarrier_wait(shared.full[box][slot], step / kSlots % 2);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int band = 0; band < kBands; ++band) ptx::fence_operands(sum[band]);
      if constexpr (kSplit) ptx::fence_operands(small_sum);
      if (part == 0 && step > 0 && step % (Config::kDepth / kStepK) == 0) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) long_sums[band].add(sum[band]);
      }
      uint32_t big[kProducts][kBands][4];
      [[maybe_unused]] uint32_t small[kSplit ? kProducts : 1][4];
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        const int k = (part * kProducts + p) * kProductK;
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint2 pair = ptx::ld_shared_8(
                (y_address[i] ^ band * 8) + slot * uint32_t{sizeof(YBox)} + k * YBox::kRowBytes);
            big[p][band][2 * i] = pair.x, big[p][band][2 * i + 1] = pair.y;
          }
        }
      }
      if (exist < kStepK) {
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int k = (part * kProducts + p) * kProductK + lane % 4 * 2 + i / 2;
#pragma unroll
            for (int band = 0; band < kBands; ++band) {
              if (k >= exist) big[p][band][i] = 0;
            }
          }
        }
      }
      if constexpr (kSplit) {
#pragma unroll
        for (int i = 0; i < kProducts * 4; ++i) {
          // Both parts are computed here, and not between the products.
          uint32_t& value = big[i / 4][0][i % 4];
          small[i / 4][i % 4] = ptx::opaque(split_tf32<true>(value));
          value = ptx::opaque(value);
        }
      }
      if (part == 0) {
        ptx::fence_proxy_async();
        __syncthreads();
      } else {
        __syncwarp();
      }
      ptx::wgmma_fence();
      using Product = ptx::WideWgmma<float>;
      const ptx::MatrixDescriptor a_big = shared.sA[a_slot].descriptor();
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        const int bytes = ATile::column_step_bytes((part * kProducts + p) * kProductK);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          Product::run(sum[band], big[p][band], a_big + bytes);
        }
      }
      if constexpr (kSplit) {
        const ptx::MatrixDescriptor a_small = shared.sA[Storage::kSlotsA + step % 2].descriptor();
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          const int bytes = ATile::column_step_bytes((part * kProducts + p) * kProductK);
          Product::run(small_sum, big[p][0], a_small + bytes);
          Product::run(small_sum, small[p], a_big + bytes);
        }
      }
      ptx::wgmma_commit_group();
      // Of a box that two warps read, the slot of the step before is free.
      if (kBands == 2 && part == Config::kParts - 1 && copies) start_copy(step + kSlots);
      if (kBands == 1 && part == 0 && copies && step > 0) start_copy(step - 1 + kSlots);
      if (part == 0) {
        if (step + Config::kAhead < steps) {
          a.start(step + Config::kAhead, next_slot, exist - Config::kAhead * kStepK);
        }
        ptx::cp_async_commit();
      }
    }
    a_slot = a_slot + 1 == Storage::kSlotsA ? 0 : a_slot + 1;
    next_slot = next_slot + 1 == Storage::kSlotsA ? 0 : next_slot + 1;
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
    ptx::fence_operands(sum[band]);
    long_sums[band].finish(sum[band]);
  }
  if constexpr (kSplit) {
    ptx::fence_operands(small_sum);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const float whole = sum[0][i / 4][i % 4];
      sum[0][i / 4][i % 4] = isfinite(whole) ? whole + small_sum[i / 4][i % 4] : whole;
    }
  }

  // Element i of block j has row 8 j + 2 (lane % 4) + i % 2, and the column i / 2 of its pair.
  const int row = lane % 4 * 2, column = box_column + lane_column;
  const int left = column < params.columns ? shared.target[warp].rows - row : 0;
  float* to =
      static_cast<float*>(params.out) + (shared.target[warp].row + row) * params.columns + column;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* line = to + i * params.columns;
      if (8 * j + i < left) {
        if constexpr (kBands == 1) {
          *reinterpret_cast<float2*>(line) = {sum[0][j][i], sum[0][j][i + 2]};
        } else {
          uint32_t pairs[2][2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float of_0 = sum[0][j][i + e * 2], of_1 = sum[kBands - 1][j][i + e * 2];
            pairs[0][e] = __float_as_uint(first_pair == 0 ? of_0 : of_1);
            pairs[1][e] = __float_as_uint(first_pair == 0 ? of_1 : of_0);
          }
          ptx::st_global_16(line, {pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]});
        }
      }
    }
    to += 8 * params.columns;
  }
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.array_jagged_bmm_jagged_out") + (Config::kTranspose ? ".transposed" : "") +
    ".wgmma." + Config::Math::kName;

template <typename Config>
cudaError_t launch_config(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  constexpr bool kTranspose = Config::kTranspose;
  const MatricesView& matrices = params.matrices;
  const int64_t y_rows = kTranspose ? matrices.rows.total : matrices.columns.total;
  ArrayF32Params launch_params;
  launch_params.product = params;
  // A tensor without rows is never copied from, but its map must be valid.
  const cudaError_t error = encode_tensor_map(launch_params.y,
                                              {y_rows > 0 ? params.y : params.out, params.type,
                                               y_rows, 1, params.columns, params.y_stride, 0},
                                              Config::kStepK, ArrayF32Storage<Config>::kBoxColumns);
  if (error != cudaSuccess) return error;
  const OffsetsView& rows = kTranspose ? matrices.columns : matrices.rows;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, Config::kTileM);
  const int64_t column_tiles = (params.columns + Config::kTileN - 1) / Config::kTileN;
  launch_params.column_tiles = static_cast<int>(column_tiles);
  return launch_overlapping<array_jagged_bmm_jagged_out_f32_wgmma<Config>>(
      params.overlaps, launch_params, {tiles * column_tiles}, Config::kThreads,
      sizeof(ArrayF32Storage<Config>), stream, kPath<Config>);
}

// The tile decides how fast a batch is, and no sum's order: the same bits whatever its mean length.
template <bool kTranspose>
cudaError_t launch_direction(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  if (params.type == ElementType::kF32) {
    const OffsetsView& rows = kTranspose ? params.matrices.columns : params.matrices.rows;
    const bool is_short = rows.total <= 32 * rows.num_seqs;
    return is_short
               ? launch_config<ArrayF32Config<F32, kTranspose, 32, 8, 3, 1, 3, 2>>(params, stream)
               : launch_config<ArrayF32Config<F32, kTranspose, 64, 8, 3, 2, 2, 2>>(params, stream);
  }
  // Where the last tile of eight warps would have few columns, tiles of four are faster.
  constexpr int kWideN = 256;
  return (params.columns - 1) % kWideN < kWideN / 2
             ? launch_config<ArrayF32Config<Tf32, kTranspose, 64, 4, 2, 2, 3, 1>>(params, stream)
             : launch_config<ArrayF32Config<Tf32, kTranspose, 64, 8, 2, 2, 2, 2>>(params, stream);
}

}  // namespace

cudaError_t launch_f32_wgmma(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_direction<true>(params, stream)
                          : launch_direction<false>(params, stream);
}

}  // namespace jagged_cuda::gemm
