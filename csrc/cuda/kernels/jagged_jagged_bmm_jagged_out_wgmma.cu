// jagged_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0): z_b = x_b y_b^T for each
// sequence b, f32 sums. 16-bit elements, f32 rounded to TF32, and f32 as three products of TF32.
//
// Grid: x, one CTA for each virtual tile of kTileM rows of x (prim/jagged.cuh), then one for each
// kZeroElems elements of the result, which writes zeros where there is no matrix
// (gemm/matrices.cuh); y, parts of the sequence's columns, more than one only where there are few
// rows. A CTA walks its columns in tiles of kTileN, and D in steps of 128 bytes. Each warpgroup has
// 64 rows of the tile, each of its warps 16 whole ones. x and y come again from L2, x for every
// kTileN columns and y for every kTileM rows.
//
//     for each tile of columns, for each step i of D:
//         wait for the copies of step i, start its product
//         wait for the product before, __syncthreads
//         start the copies that follow, into the slot that is free now
//     and after the last step of a tile: wait for its product, store it
//
// TF32: the copies round. F32: each step is split in shared memory, into what the copies brought,
// rounded to TF32, and what this leaves, between two barriers:
//
//         wait for the product before, __syncthreads, start the copies that follow
//         wait for the copies of step i, split them, __syncthreads
//         start its three products
//
// Those of a big and a small part have a sum of their own: an infinite operand makes it NaN, so it
// counts only where the first sum is finite.
//
// Tensor cores truncate as they add: every kDepth of D the sum is added to a rounded one
// (RoundedSum).
//
// Storing: rows of z_b begin at any element (gemm/ragged_rows.cuh).
//
// Shared memory: kSlots slots of x [kTileM, 128 bytes] and y [kTileN, 128 bytes]; F32 one more for
// the small parts; 8 lines for each warp.
//
// Barriers: full[slot], on which the bytes of a slot complete. __syncthreads in a step: all have
// seen the product end whose slot is filled next, or have split their share. __syncwarp around a
// warp's lines.
//
// Virtual tiles without rows, rows outside every sequence and matrices that do not fit return at
// once, as does a sequence without columns. Copies are of kBox rows, as many as have one that
// exists: they may reach into the next sequence, and what lies behind them is old, which gives
// elements that are not stored; past D both operands are zeros.
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/ragged_rows.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/tma.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Math_, int kWarpgroups_, int kTileN_, int kSlots_, int kMinCtas_>
struct MatricesWgmmaConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kThreads = kWarpgroups * 128;
  static constexpr int kTileM = kWarpgroups * 64;
  static constexpr int kTileN = kTileN_;
  static constexpr int kStepK = 128 / sizeof(Element);
  static constexpr int kProductK = 32 / sizeof(Element);  // of one wgmma
  #ifndef BOX
#define BOX 32
#endif
  static constexpr int kBox = BOX;                         // rows of a copy
  static constexpr int kSlots = kSlots_;
  static constexpr int kMinCtas = kMinCtas_;
  // As exact as f32 products with a sum for each stage are (gemm/engine.cuh).
  static constexpr int kDepth = Math::kCompensated ? 128 : kSumDepth;
};

template <typename Config>
struct StepTiles {
  using X = WarpgroupTile<typename Config::Element, Config::kTileM, Config::kStepK>;
  using Y = WarpgroupTile<typename Config::Element, Config::kTileN, Config::kStepK>;
  X sX;
  Y sY;
};
struct NoTiles {};

template <typename Config>
struct MatricesWgmmaStorage {
  StepTiles<Config> slots[Config::kSlots];
  std::conditional_t<Config::Math::kCompensated, StepTiles<Config>, NoTiles> small;
  RaggedRows<typename Config::Element> lines[Config::kThreads / 32];
  uint64_t full[Config::kSlots];
};

struct MatricesWgmmaParams {
  CUtensorMap x, y;  // boxes of kBox rows and 128 bytes
  JaggedJaggedBmmJaggedOutParams product;
  int64_t row_tiles;
};

// Rounds the first `chunks` 16-byte chunks of a tile to TF32, and writes what is left.
template <int kThreads>
__device__ __forceinline__ void split_tile(float* sBig, float* sSmall, int chunks) {
#pragma unroll 4
  for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
    uint4 big = *reinterpret_cast<const uint4*>(sBig + 4 * chunk);
    uint4 small;
    small.x = split_tf32<true>(big.x);
    small.y = split_tf32<true>(big.y);
    small.z = split_tf32<true>(big.z);
    small.w = split_tf32<true>(big.w);
    *reinterpret_cast<uint4*>(sBig + 4 * chunk) = big;
    *reinterpret_cast<uint4*>(sSmall + 4 * chunk) = small;
  }
}

// sum += a b, 64 rows of a from `row` on and the first 8 kBlocks rows of b, one step of K.
template <typename Config, int kBlocks, typename ATile, typename BTile>
__device__ __forceinline__ void multiply_tiles(float (&sum)[kBlocks][4], const ATile& a, int row,
                                               const BTile& b, bool accumulate) {
  const ptx::MatrixDescriptor a_rows = a.descriptor(row), b_rows = b.descriptor();
#pragma unroll
  for (int k = 0; k < Config::kStepK; k += Config::kProductK) {
    ptx::Wgmma<typename Config::Element, false>::run(sum, a_rows + ATile::column_step_bytes(k),
                                                     b_rows + BTile::column_step_bytes(k),
                                                     accumulate || k > 0);
  }
}

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_jagged_out_wgmma(
    const __grid_constant__ MatricesWgmmaParams launch) {
  using Element = typename Config::Element;
  using Storage = MatricesWgmmaStorage<Config>;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStepK = Config::kStepK;
  constexpr int kSlots = Config::kSlots, kBox = Config::kBox, kThreads = Config::kThreads;
  constexpr bool kSplit = Config::Math::kCompensated;
  extern __shared__ __align__(1024) char matrices_wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(matrices_wgmma_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  Element* gOut = static_cast<Element*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    const int64_t part = blockIdx.x - launch.row_tiles;
    if (blockIdx.y == 0) zero_outside<kThreads>(params.matrices, gOut, part);
    return;
  }

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.x);
    ptx::prefetch_tensormap(launch.y);
    for (int slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(shared.full[slot], 1);
    ptx::fence_mbarrier_init();
  }
  const JaggedTile tile = find_tile<kTileM>(params.matrices.rows, blockIdx.x);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const Matrix matrix = find_matrix(params.matrices, tile.seq);
  const int64_t pitch = matrix.columns.len;
  const int64_t each = gridDim.y == 1 ? pitch : (pitch / kTileN + gridDim.y) / gridDim.y * kTileN;
  if (!matrix.fits || blockIdx.y * each >= pitch) return;
  const int begin = static_cast<int>(blockIdx.y * each);
  const int end = static_cast<int>(min(begin + each, pitch));
  const int rows = static_cast<int>(min(tile.rows.len - tile.row, int64_t{kTileM}));
  const int inner = static_cast<int>(params.inner);
  const auto boxes_of = [](int count, int most) { return (min(count, most) + kBox - 1) / kBox; };
  const int x_boxes = boxes_of(rows, kTileM);

  int load_n = begin, load_k = 0, load_slot = 0;
  const auto start_next = [&] {  // one thread alone
    if (load_n >= end) return;
    uint64_t& full = shared.full[load_slot];
    StepTiles<Config>& tiles = shared.slots[load_slot];
    const int y_boxes = boxes_of(end - load_n, kTileN);
    ptx::mbarrier_arrive_expect_tx(full, (x_boxes + y_boxes) * kBox * 128);
    for (int box = 0; box < x_boxes; ++box) {
      ptx::cp_async_bulk_tensor_3d(tiles.sX.data + box * kBox * kStepK, launch.x, load_k, 0,
                                   static_cast<int>(tile.rows.begin + tile.row) + box * kBox, full);
    }
    for (int box = 0; box < y_boxes; ++box) {
      ptx::cp_async_bulk_tensor_3d(tiles.sY.data + box * kBox * kStepK, launch.y, load_k, 0,
                                   static_cast<int>(matrix.columns.begin) + load_n + box * kBox,
                                   full);
    }
    load_slot = load_slot + 1 == kSlots ? 0 : load_slot + 1;
    load_k += kStepK;
    if (load_k >= inner) load_k = 0, load_n += kTileN;
  };

  __syncthreads();  // the barriers are initialised
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) start_next();
#ifdef PREFETCH
    const int row_bytes = inner * static_cast<int>(sizeof(Element));
    if (params.x_stride == inner) {
      ptx::cp_async_bulk_prefetch_l2(static_cast<const Element*>(params.x) + (tile.rows.begin + tile.row) * inner, rows * row_bytes);
    }
    if (params.y_stride == inner) {
      ptx::cp_async_bulk_prefetch_l2(static_cast<const Element*>(params.y) + (matrix.columns.begin + begin) * inner, min(end - begin, 256) * row_bytes);
    }
#endif
  }
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
  const bool at_work = Config::kWarpgroups == 1 || warpgroup * 64 < rows;
  Element* gRows = gOut + matrix.begin + (tile.row + 16 * warp) * pitch;
  int slot = 0, parity = 0;
  // One tile of columns from n on, in products of 8 kBlocks of them.
  const auto multiply_columns = [&](auto num_blocks, int n) {
    constexpr int kBlocks = decltype(num_blocks)::value;
    const int columns = min(end - n, kTileN);
    float sum[kBlocks][4];
    [[maybe_unused]] float small_sum[kSplit ? kBlocks : 1][4];
    RoundedSum<kBlocks> rounded;
    for (int k = 0; k < inner; k += kStepK) {
      const int depth = k % Config::kDepth;  // that the sum has
      const bool first = n == begin && k == 0;
      if (kSplit || (k > 0 && depth == 0)) {
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(sum);
        if (k > 0 && depth == 0) rounded.add(sum);
      }
      StepTiles<Config>& tiles = shared.slots[slot];
      if constexpr (kSplit) {
        if (!first) {
          __syncthreads();
          if (threadIdx.x == 0) start_next();
        }
        ptx::mbarrier_wait(shared.full[slot], parity);
        split_tile<kThreads>(tiles.sX.data, shared.small.sX.data, x_boxes * kBox * 8);
        split_tile<kThreads>(tiles.sY.data, shared.small.sY.data,
                             boxes_of(columns, kTileN) * kBox * 8);
        ptx::fence_proxy_async();
        __syncthreads();
      } else {
        ptx::mbarrier_wait(shared.full[slot], parity);
      }
      if (at_work) {
        const int row = warpgroup * 64;
        ptx::wgmma_fence();
        multiply_tiles<Config>(sum, tiles.sX, row, tiles.sY, depth > 0);
        if constexpr (kSplit) {
          multiply_tiles<Config>(small_sum, tiles.sX, row, shared.small.sY, k > 0);
          multiply_tiles<Config>(small_sum, shared.small.sX, row, tiles.sY, true);
        }
        ptx::wgmma_commit_group();
      }
      if constexpr (!kSplit) {
        if (!first) {
          ptx::wgmma_wait_group<1>();
          __syncthreads();
          if (threadIdx.x == 0) start_next();
        }
      }
      if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    rounded.finish(sum);
    if constexpr (kSplit) {
      ptx::fence_operands(small_sum);
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        const float big = sum[i / 4][i % 4];
        sum[i / 4][i % 4] = isfinite(big) ? big + small_sum[i / 4][i % 4] : big;
      }
    }
    shared.lines[warp].store(sum, gRows + n, static_cast<int>(pitch), rows - 16 * warp, columns);
  };
  for (int n = begin; n < end; n += kTileN) {
    if (kTileN > 64 && end - n <= 64) {
      multiply_columns(std::integral_constant<int, 8>{}, n);
    } else {
      multiply_columns(std::integral_constant<int, kTileN / 8>{}, n);
    }
  }
}

template <typename Math>
constexpr PathName kPath = PathName("cuda.jagged_jagged_bmm_jagged_out.wgmma.") + Math::kName;

template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  const auto encode = [&](CUtensorMap& map, const void* data, int64_t count, int64_t stride) {
    // A tensor without rows is never copied from, but its map must be valid.
    return encode_tensor_map(
        map, {count > 0 ? data : params.out, params.type, count, 1, params.inner, stride, 0},
        Config::kBox, Config::kStepK);
  };
  MatricesWgmmaParams launch_params;
  launch_params.product = params;
  launch_params.row_tiles = num_tiles(rows.total, rows.num_seqs, Config::kTileM);
  cudaError_t error = encode(launch_params.x, params.x, rows.total, params.x_stride);
  if (error == cudaSuccess) {
    error = encode(launch_params.y, params.y, columns.total, params.y_stride);
  }
  if (error != cudaSuccess) return error;
  const ColumnSplit split = split_columns(columns.total, Config::kTileN, launch_params.row_tiles);
  const int64_t ctas = launch_params.row_tiles + num_zero_ctas(params.matrices.capacity);
  return launch<jagged_jagged_bmm_jagged_out_wgmma<Config>>(
      launch_params, {ctas, split.parts}, Config::kThreads, sizeof(MatricesWgmmaStorage<Config>),
      stream, kPath<typename Config::Math>);
}

}  // namespace

// Tiles chosen by time on an H200 (docs/performance_log.md).
cudaError_t launch_wgmma(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  switch (params.type) {
    case ElementType::kBf16:
      return launch_config<MatricesWgmmaConfig<Bf16, 2, 128, 3, 2>>(params, stream);
    case ElementType::kF16:
      return launch_config<MatricesWgmmaConfig<F16, 2, 128, 3, 2>>(params, stream);
    case ElementType::kTf32:
      return launch_config<MatricesWgmmaConfig<Tf32, 2, 128, 2, 2>>(params, stream);
    case ElementType::kF32:
      return launch_config<MatricesWgmmaConfig<F32, 1, 128, 2, 3>>(params, stream);
    case ElementType::kF64:
      break;
  }
  return cudaErrorNotSupported;
}

}  // namespace jagged_cuda::gemm
