// jagged_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0): z_b = x_b y_b^T for each
// sequence b, f32 sums. 16-bit elements, and f32 rounded to TF32, which the copies do.
//
// Grid: x, one CTA for each virtual tile of 64 rows of x (prim/jagged.cuh), then one for each
// kZeroElems elements of the result, which writes zeros where there is no matrix
// (gemm/matrices.cuh); y, parts of the sequence's columns, more than one only where there are few
// rows. A CTA walks its columns in tiles of kTileN, and D in steps of 128 bytes. Its four warps are
// one warpgroup; each owns 16 whole rows.
//
//     for each tile of columns, for each step i of D:
//         wait for the copies of step i, start its product
//         wait for the product before, __syncthreads
//         start the copies that follow, into the slot that is free now
//     and after the last step of a tile: wait for its product, store it
//
// Tensor cores truncate as they add: every kSumDepth of D the sum is added to a rounded one
// (RoundedSum).
//
// Storing: rows of z_b begin at any element. Eight at a time are written to shared memory as far
// from a multiple of 16 bytes as they lie in global memory, and leave from there as aligned
// granules; only those that another row shares leave element by element (f32: gemm/ragged_rows.cuh).
//
// Shared memory: kSlots slots of x [64, 128 bytes] and y [kTileN, 128 bytes]; 8 rows for each warp.
//
// Barriers: full[slot], on which the bytes of a slot complete. One __syncthreads a step: all have
// seen the product end whose slot is filled next. __syncwarp around a warp's rows.
//
// Virtual tiles without rows, rows outside every sequence and matrices that do not fit return at
// once, as does a sequence without columns. A copy may reach into the next sequence, which gives
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

// Chosen by time, of 16 bits on an H100, of TF32 on an H200 (docs/performance_log.md).
template <typename Math_>
struct MatricesWgmmaConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kTileM = 64;
  static constexpr int kStepK = 128 / sizeof(Element);
  static constexpr int kProductK = 32 / sizeof(Element);  // of one wgmma
  static constexpr int kThreads = 128;
  static constexpr int kTileN = kWide ? 128 : 64;
  static constexpr int kSlots = kWide ? 4 : 3;
  static constexpr int kMinCtas = kWide ? 2 : 4;
};

// Where a warp turns 8 rows of 16-bit elements: room for a shift, and lines whose banks differ.
template <typename Element, int kTileN>
struct ShiftedRows {
  static constexpr int kLine = kTileN + 24;
  static_assert(kLine / 2 % 32 == 12);

  alignas(128) Element rows[8 * kLine];
};

template <typename Config>
struct MatricesWgmmaStorage {
  using Element = typename Config::Element;
  using XTile = WarpgroupTile<Element, Config::kTileM, Config::kStepK>;
  using YTile = WarpgroupTile<Element, Config::kTileN, Config::kStepK>;
  using WarpRows =
      std::conditional_t<Config::kWide, RaggedRows, ShiftedRows<Element, Config::kTileN>>;

  XTile sX[Config::kSlots];
  YTile sY[Config::kSlots];
  WarpRows sRows[Config::kThreads / 32];
  uint64_t full[Config::kSlots];
};

struct MatricesWgmmaParams {
  CUtensorMap x, y;  // boxes of 64 rows and 128 bytes
  JaggedJaggedBmmJaggedOutParams product;
  int64_t row_tiles;
};

// Stores a warp's 16 rows, [rows, columns] of which exist: `global` is the first, `pitch` elements
// lead to the next. All lanes call it together.
template <int kTileN, typename Element>
__device__ __forceinline__ void store_shifted(const float (&sum)[kTileN / 8][4],
                                              ShiftedRows<Element, kTileN>& warp, Element* global,
                                              int64_t pitch, int rows, int columns) {
  constexpr int kGranule = 8, kGranules = kTileN / kGranule;
  constexpr int kLine = ShiftedRows<Element, kTileN>::kLine;
  Element* sRows = warp.rows;
  static_assert(32 % kGranules == 0);
  const int lane = threadIdx.x % 32;
  const auto shift_of = [](const Element* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(Element) % kGranule);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half >= rows) return;
    Element* gHalf = global + 8 * half * pitch;
    Element* sRow = sRows + lane / 4 * kLine + shift_of(gHalf + lane / 4 * pitch) + lane % 4 * 2;
    __syncwarp();  // the rows before have been read
#pragma unroll
    for (int block = 0; block < kTileN / 8; ++block) {
      if (8 * block >= columns) break;
      sRow[8 * block] = from_sum<Element>(sum[block][2 * half]);
      sRow[8 * block + 1] = from_sum<Element>(sum[block][2 * half + 1]);
    }
    __syncwarp();  // the rows are there for all lanes

    // Granules that the row fills.
#pragma unroll
    for (int step = 0; step < 8; step += 32 / kGranules) {
      const int line = step + lane / kGranules, elem = lane % kGranules * kGranule;
      Element* gRow = gHalf + line * pitch;
      const int shift = shift_of(gRow);
      if (8 * half + line < rows && elem >= shift && elem + kGranule <= shift + columns) {
        *reinterpret_cast<uint4*>(gRow - shift + elem) =
            *reinterpret_cast<const uint4*>(&sRows[line * kLine + elem]);
      }
    }
    // The elements before the first and after the last of them.
#pragma unroll
    for (int step = 0; step < 8; step += 2) {
      const int line = step + lane / 16, place = lane % kGranule;
      const bool is_tail = lane % 16 >= kGranule;
      Element* gRow = gHalf + line * pitch;
      const int shift = shift_of(gRow), last = shift + columns;
      const int tail = last / kGranule * kGranule;
      const bool exists = is_tail ? tail > 0 || shift == 0 : shift > 0;
      const int elem = (is_tail ? tail : 0) + place;
      if (8 * half + line < rows && exists && elem >= shift && elem < last) {
        gRow[elem - shift] = sRows[line * kLine + elem];
      }
    }
  }
}

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_jagged_out_wgmma(
    const __grid_constant__ MatricesWgmmaParams launch) {
  using Element = typename Config::Element;
  using Storage = MatricesWgmmaStorage<Config>;
  using XTile = typename Storage::XTile;
  using YTile = typename Storage::YTile;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStepK = Config::kStepK;
  constexpr int kSlots = Config::kSlots, kBox = 64;
  extern __shared__ __align__(1024) char matrices_wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<Storage*>(matrices_wgmma_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  Element* gOut = static_cast<Element*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    const int64_t part = blockIdx.x - launch.row_tiles;
    if (blockIdx.y == 0) zero_outside<Config::kThreads>(params.matrices, gOut, part);
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

  int load_n = begin, load_k = 0, load_slot = 0;
  const auto start_next = [&] {  // one thread alone
    if (load_n >= end) return;
    uint64_t& full = shared.full[load_slot];
    const int boxes = min(kTileN / kBox, (end - load_n + kBox - 1) / kBox);
    ptx::mbarrier_arrive_expect_tx(full, (1 + boxes) * kBox * kStepK * sizeof(Element));
    ptx::cp_async_bulk_tensor_3d(shared.sX[load_slot].data, launch.x, load_k, 0,
                                 static_cast<int>(tile.rows.begin + tile.row), full);
    for (int box = 0; box < boxes; ++box) {
      ptx::cp_async_bulk_tensor_3d(
          shared.sY[load_slot].data + box * kBox * kStepK, launch.y, load_k, 0,
          static_cast<int>(matrix.columns.begin) + load_n + box * kBox, full);
    }
    load_slot = load_slot + 1 == kSlots ? 0 : load_slot + 1;
    load_k += kStepK;
    if (load_k >= inner) load_k = 0, load_n += kTileN;
  };

  __syncthreads();  // the barriers are initialised
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) start_next();
  }
  const int warp = threadIdx.x / 32;
  Element* gRows = gOut + matrix.begin + (tile.row + 16 * warp) * pitch;
  int slot = 0, parity = 0;
  // The columns of a tile from n on, of which 8 kBlocks are computed.
  const auto multiply_columns = [&](auto num_blocks, int n) {
    constexpr int kBlocks = decltype(num_blocks)::value;
    const int columns = min(end - n, kTileN);
    float sum[kBlocks][4];
    RoundedSum<kBlocks> rounded;
    for (int k = 0; k < inner; k += kStepK) {
      const int depth = k % kSumDepth;  // that the sum has
      if (k > 0 && depth == 0) {
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(sum);
        rounded.add(sum);
      }
      ptx::mbarrier_wait(shared.full[slot], parity);
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor x_rows = shared.sX[slot].descriptor(),
                                  y_rows = shared.sY[slot].descriptor();
#pragma unroll
      for (int step = 0; step < kStepK; step += Config::kProductK) {
        ptx::Wgmma<Element, false>::run(sum, x_rows + XTile::column_step_bytes(step),
                                        y_rows + YTile::column_step_bytes(step),
                                        depth > 0 || step > 0);
      }
      ptx::wgmma_commit_group();
      const bool first = n == begin && k == 0;
      if (!first) {
        ptx::wgmma_wait_group<1>();
        __syncthreads();
        if (threadIdx.x == 0) start_next();
      }
      if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    rounded.finish(sum);
    const int rows_left = rows - 16 * warp;
    if constexpr (Config::kWide) {
      shared.sRows[warp].store(sum, gRows + n, static_cast<int>(pitch), rows_left, columns);
    } else {
      store_shifted<kTileN>(sum, shared.sRows[warp], gRows + n, pitch, rows_left, columns);
    }
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

template <typename Math>
cudaError_t launch_math(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  using Config = MatricesWgmmaConfig<Math>;
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  const auto encode = [&](CUtensorMap& map, const void* data, int64_t count, int64_t stride) {
    // A tensor without rows is never copied from, but its map must be valid.
    return encode_tensor_map(
        map, {count > 0 ? data : params.out, params.type, count, 1, params.inner, stride, 0}, 64,
        Config::kStepK);
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
      stream, kPath<Math>);
}

}  // namespace

cudaError_t launch_wgmma(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  switch (params.type) {
    case ElementType::kBf16:
      return launch_math<Bf16>(params, stream);
    case ElementType::kF16:
      return launch_math<F16>(params, stream);
    case ElementType::kTf32:
      return launch_math<Tf32>(params, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace jagged_cuda::gemm
