// array_jagged_bmm_jagged_out of f32 on wgmma and TMA (compute capability 9.0): z_b = A_b y_b, or
// A_b^T y_b, for each sequence b; rounded to TF32, or as three products of TF32; f32 sums.
//
// TF32 operands in shared memory must have stride 1 along K. A_b has, or gets it on its way there;
// y has not, but an operand in registers may come from anywhere. So the product is computed
// transposed: z_b^T = y_b^T A_b^T, with y_b^T [N, K] from registers and A_b^T [K, M] from shared
// memory.
//
// Grid: one CTA for each virtual tile of kTileM rows of the result (prim/jagged.cuh) and kTileN of
// its columns, those of one tile beside each other, or all of them, part by part (kAllColumns). Each of
// two warpgroups has 64 of the columns, each of its warps 16, for all rows. The sum runs over K in
// order, kStepK at a time: deterministic, and alike in any batch. Tensor cores truncate as they add:
// every kDepth of K the sum is added to a rounded one (RoundedSum).
//
// y comes by TMA, which rounds it to TF32 if that is all. A_b begins at any element and has any
// pitch: it comes by loads of single elements, a step ahead, in registers, and is rounded or split
// once, when it is written to shared memory.
//
//     for each step i:   write A_i to sA[i % 2], start the loads of A_{i+1}
//                        wait for y_i and for the product of step i - 1
//                        load y_i into registers; what lies past the end becomes zeros
//                        __syncthreads
//                        start the copy of y_{i + kSlots}
//                        start the product of step i
//
// F32: the products of a big and a small part have a sum of their own: an infinite operand makes it
// NaN, so it counts only where the first sum is finite.
//
// The terms of a sum may come in any order that both operands have: of eight neighbours of K those
// at even places come first, so that the loads of y from shared memory, four rows of eight elements,
// are free of bank conflicts.
//
// Shared memory: kSlots slots of y [kStepK, kTileN]; twice A [kTileM, kStepK], F32 twice that.
//
// Barriers: full[slot], on which the bytes of y complete; a thread of each warp arrives. One
// __syncthreads a step: A_i has been written, y_i has been read by all, and all have seen the product
// before end, whose A is written next.
//
// Virtual tiles without rows return at once. Rows outside every sequence, those of a matrix that
// does not fit, and those of a matrix without columns take no step: zeros. A tile ends with its
// sequence, and its loads and stores are predicated. A copy of y may reach into the next sequence.
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Math_, bool kTranspose_, int kTileM_, int kSlots_, int kMinCtas_>
struct ArrayF32Config {
  using Math = Math_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kTileM = kTileM_;  // rows of the result
  static constexpr int kThreads = 256;
  static constexpr int kTileN = 128;  // columns, 64 for each warpgroup
  static constexpr int kStepK = 32;
  static constexpr int kSlots = kSlots_;
  static constexpr int kMinCtas = kMinCtas_;
  static constexpr int kBlocks = kTileM / 8;
  static constexpr int kElems = kTileM * kStepK / kThreads;  // of A in each thread
  static constexpr int kDepth = Math::kCompensated ? 128 : kSumDepth;
  // Where rows are few a CTA walks all columns: the search for its rows is most of its work.
  static constexpr bool kAllColumns = kTileM == 32;
  static_assert(kTileM == 32 || kTileM == 64 || kTileM == 128);
};

template <typename Config>
struct ArrayF32Storage {
  static constexpr int kBoxColumns = 32;
  using YBox = WarpgroupTile<float, Config::kStepK, kBoxColumns>;
  using ATile = WarpgroupTile<float, Config::kTileM, Config::kStepK>;
  static constexpr int kParts = Config::Math::kCompensated ? 2 : 1;  // big, small

  YBox sY[Config::kSlots][Config::kTileN / kBoxColumns];
  ATile sA[2][kParts];
  uint64_t full[Config::kSlots];
};

struct ArrayF32Params {
  CUtensorMap y;  // boxes of kStepK rows and 32 columns
  ArrayJaggedBmmJaggedOutParams product;
  int column_tiles;  // of a tile of rows in the grid
};

// This thread's elements of A's tile: from global memory through registers to shared memory. Of a
// line of A, neighbouring along K, a warp has 32 elements; transposed, where lines lie along M, eight
// elements of four lines. The first element has row `row` and place `k` along K, the others follow
// every eight rows.
template <typename Config>
struct ArrayPart {
  using ATile = typename ArrayF32Storage<Config>::ATile;
  static constexpr bool kTranspose = Config::kTranspose;

  const float* global;  // the thread's first element in step 0
  int64_t pitch;
  int row, k, rows;
  uint32_t values[Config::kElems];

  __device__ __forceinline__ ArrayPart(const float* gA, int64_t line, int tile_rows)
      : pitch(line), rows(tile_rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row = kTranspose ? lane % 8 : warp;
    k = kTranspose ? warp / 2 * 8 + lane / 8 * 2 + warp % 2 : lane;
    global = gA + (kTranspose ? k * pitch + row : row * pitch + k);
  }

  // Starts the loads of step `step`, of which `exist` places along K are there.
  __device__ __forceinline__ void load(int step, int exist) {
    const float* source =
        global + (kTranspose ? step * Config::kStepK * pitch : int64_t{step} * Config::kStepK);
    const int left = k < exist ? rows - row : 0;
#pragma unroll
    for (int i = 0; i < Config::kElems; ++i) {
      values[i] = 8 * i < left ? __float_as_uint(__ldg(source)) : 0;
      source += kTranspose ? int64_t{8} : 8 * pitch;
    }
  }

  // Even places of eight come first.
  __device__ __forceinline__ void store(ATile (&sA)[ArrayF32Storage<Config>::kParts]) {
    const int chunk = k / 8 * 2 + k % 2, word = k % 8 / 2;
#pragma unroll
    for (int i = 0; i < Config::kElems; ++i) {
      uint32_t value = values[i];
      const uint32_t small = split_tf32<Config::Math::kCompensated>(value);
      reinterpret_cast<uint32_t*>(sA[0].chunk(row, chunk))[i * 8 * ATile::kColumns + word] = value;
      if constexpr (Config::Math::kCompensated) {
        reinterpret_cast<uint32_t*>(sA[1].chunk(row, chunk))[i * 8 * ATile::kColumns + word] =
            small;
      }
    }
  }
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void array_jagged_bmm_jagged_out_f32_wgmma(
    const __grid_constant__ ArrayF32Params launch) {
  using Storage = ArrayF32Storage<Config>;
  using YBox = typename Storage::YBox;
  using ATile = typename Storage::ATile;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStepK = Config::kStepK;
  constexpr int kSlots = Config::kSlots, kBlocks = Config::kBlocks, kBox = Storage::kBoxColumns;
  constexpr bool kTranspose = Config::kTranspose, kSplit = Config::Math::kCompensated;
  constexpr int kProductK = 8, kProducts = kStepK / kProductK;
  extern __shared__ __align__(1024) char array_f32_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(array_f32_shared_bytes);
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  const MatricesView& matrices = params.matrices;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.y);
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], Config::kThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }
  const JaggedTile tile = find_tile_narrow<kTileM>(kTranspose ? matrices.columns : matrices.rows,
                                                   blockIdx.x / launch.column_tiles);
  if (tile.row >= tile.rows.len) return;
  const int rows = clamp_extent(tile.rows.len - tile.row, kTileM);
  const int first_column = blockIdx.x % launch.column_tiles * kTileN;
  const int all_columns = static_cast<int>(params.columns) - first_column;
  const int parts = Config::kAllColumns ? (all_columns + kTileN - 1) / kTileN : 1;

  int depth = 0, y_row = 0;
  int64_t pitch = 0;
  const float* gA = static_cast<const float*>(params.a);
  if (tile.seq >= 0) {
    const Matrix matrix = find_matrix(matrices, tile.seq);
    pitch = matrix.columns.len;
    if (matrix.fits) {
      const RowRange& summed = kTranspose ? matrix.rows : matrix.columns;
      depth = static_cast<int>(summed.len);
      y_row = static_cast<int>(summed.begin);
      gA += matrix.begin + (kTranspose ? tile.row : tile.row * pitch);
    }
  }
  const int steps = (depth + kStepK - 1) / kStepK;
  const auto start_copy = [&](int index) {  // of the steps of all parts; a thread of each warp
    if (index >= parts * steps) return;
    const int part = Config::kAllColumns ? index / steps : 0, slot = index % kSlots;
    const int column = first_column + part * kTileN;
    const int box = threadIdx.x / 32,
              boxes = (clamp_extent(params.columns - column, kTileN) + kBox - 1) / kBox;
    ptx::mbarrier_arrive_expect_tx(shared.full[slot], box < boxes ? kBox * kStepK * 4 : 0);
    if (box < boxes) {
      ptx::cp_async_bulk_tensor_3d(shared.sY[slot][box].data, launch.y, column + box * kBox, 0,
                                   y_row + (index - part * steps) * kStepK, shared.full[slot]);
    }
  };

  __syncthreads();  // the barriers are initialised
  if (threadIdx.x % 32 == 0) {
    for (int slot = 0; slot < kSlots; ++slot) start_copy(slot);
  }
  ArrayPart<Config> a(gA, pitch, rows);
  a.load(0, depth);
  const int lane = threadIdx.x % 32, own_column = threadIdx.x / 32 * 16;
  // Register i of y^T [16, 8] has column lane / 4 + 8 (i % 2) and row 2 (lane % 4) + i / 2.
  uint32_t y_address[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = own_column + lane / 4 + i % 2 * 8;
    YBox& sY = shared.sY[0][column / kBox];
    y_address[i] = ptx::shared_address(sY.chunk(lane % 4 * 2 + i / 2, column % kBox / 4)) +
                   column % 4 * sizeof(float);
  }
  for (int part = 0; part < parts; ++part) {
    float sum[kBlocks][4] = {};
    [[maybe_unused]] float small_sum[kSplit ? kBlocks : 1][4] = {};
    uint32_t big[kProducts][4];
    [[maybe_unused]] uint32_t small[kSplit ? kProducts : 1][4];
    RoundedSum<kBlocks> rounded;
    for (int step = 0; step < steps; ++step) {
      const int index = part * steps + step, slot = index % kSlots, exist = depth - step * kStepK;
      ATile(&sA)[Storage::kParts] = shared.sA[index % 2];
      a.store(sA);
      if (step + 1 < steps) {
        a.load(step + 1, exist - kStepK);
      } else if (part + 1 < parts) {
        a.load(0, depth);
      }
      ptx::mbarrier_wait(shared.full[slot], index / kSlots % 2);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(sum);
      if constexpr (kSplit) ptx::fence_operands(small_sum);
      if (step > 0 && step % (Config::kDepth / kStepK) == 0) rounded.add(sum);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          big[p][i] = ptx::ld_shared_4(y_address[i] + slot * sizeof(shared.sY[0]) +
                                       p * kProductK * YBox::kRowBytes);
          if (p * kProductK + lane % 4 * 2 + i / 2 >= exist) big[p][i] = 0;
          if constexpr (kSplit) {
            // Both parts are computed here, and not between the products.
            small[p][i] = ptx::opaque(static_cast<int>(split_tf32<true>(big[p][i])));
            big[p][i] = ptx::opaque(static_cast<int>(big[p][i]));
          }
        }
      }
      ptx::fence_proxy_async();
      __syncthreads();
      if (threadIdx.x % 32 == 0) start_copy(index + kSlots);
      using Product = ptx::WideWgmma<float>;
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor a_rows = sA[0].descriptor();
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        Product::run(sum, big[p], a_rows + ATile::column_step_bytes(p * kProductK));
      }
      if constexpr (kSplit) {
        const ptx::MatrixDescriptor a_small = sA[1].descriptor();
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          Product::run(small_sum, big[p], a_small + ATile::column_step_bytes(p * kProductK));
        }
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          Product::run(small_sum, small[p], a_rows + ATile::column_step_bytes(p * kProductK));
        }
      }
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    rounded.finish(sum);
    if constexpr (kSplit) {
      ptx::fence_operands(small_sum);
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        const float whole = sum[i / 4][i % 4];
        sum[i / 4][i % 4] = isfinite(whole) ? whole + small_sum[i / 4][i % 4] : whole;
      }
    }

    // Element i of block j has row 8 j + 2 (lane % 4) + i % 2, column lane / 4 + 8 (i / 2).
    const int row = lane % 4 * 2, column = own_column + lane / 4,
              part_column = first_column + part * kTileN,
              columns = clamp_extent(params.columns - part_column, kTileN);
    float* gOut = static_cast<float*>(params.out) +
                  (tile.rows.begin + tile.row + row) * params.columns + part_column + column;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + 8 * j + i % 2 < rows && column + i / 2 * 8 < columns) {
          gOut[(8 * j + i % 2) * params.columns + i / 2 * 8] = sum[j][i];
        }
      }
    }
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
  const int64_t column_tiles =
      Config::kAllColumns ? 1 : (params.columns + Config::kTileN - 1) / Config::kTileN;
  launch_params.column_tiles = static_cast<int>(column_tiles);
  return launch<array_jagged_bmm_jagged_out_f32_wgmma<Config>>(
      launch_params, {tiles * column_tiles}, Config::kThreads, sizeof(ArrayF32Storage<Config>),
      stream, kPath<Config>);
}

// The tile decides how fast a batch is, and no sum's order: the same bits whatever its mean length.
template <bool kTranspose>
cudaError_t launch_direction(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView& rows = kTranspose ? params.matrices.columns : params.matrices.rows;
  const bool is_tf32 = params.type == ElementType::kTf32;
  if (rows.total <= 32 * rows.num_seqs) {
    return is_tf32 ? launch_config<ArrayF32Config<Tf32, kTranspose, 32, 2, 4>>(params, stream)
                   : launch_config<ArrayF32Config<F32, kTranspose, 32, 2, 2>>(params, stream);
  }
  return is_tf32 ? launch_config<ArrayF32Config<Tf32, kTranspose, 128, 2, 2>>(params, stream)
                 : launch_config<ArrayF32Config<F32, kTranspose, 64, 3, 2>>(params, stream);
}

}  // namespace

cudaError_t launch_f32_wgmma(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_direction<true>(params, stream)
                          : launch_direction<false>(params, stream);
}

}  // namespace jagged_cuda::gemm
