// array_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0), 16-bit elements: z_b = A_b
// y_b, or A_b^T y_b, for each sequence b, f32 sums.
//
// Grid: one CTA for each virtual tile of 64 rows of the result (prim/jagged.cuh) and each kTileN of
// its columns, so that up to 256 of them read A_b once. Those of more columns are the grid's y, or,
// interleaved, follow each other in x, so that A_b comes from memory once. The four warps are one
// warpgroup; each owns 16 whole rows. The sum runs over a sequence's rows in order, kStepK at a time:
// deterministic, and alike in any batch. Tensor cores truncate as they add, at most 2^-23 of the sum for
// each 16 rows; every kSumDepth rows the sum is added to a rounded one (RoundedSum).
//
// y_b comes by TMA. A_b begins at any element and has any pitch, which TMA cannot copy: its lines
// come as aligned granules by cp.async (gemm/shifted.cuh), and a warp picks its fragments from them
// (gemm/raw_lines.cuh).
//
//     for each step i:   wait for the copies of A_i and y_i; the rows past the end become zeros
//                        wait for the product of step i - 1
//                        __syncthreads
//                        start the copies of step i + kSlots - 1
//                        load A_i into registers, start the product of step i
//
// Shared memory: kSlots slots of y [kStepK, kTileN] and of A's granules, lines of [64, kStepK], or,
// transposed, of [kStepK, 64].
//
// Barriers: full[slot], on which the bytes of y complete; a thread of each warp arrives. One
// __syncthreads a step: A_i and the zeros have been written by all, and all have seen the product end
// whose slots are filled next.
//
// Virtual tiles without rows return at once. Rows outside every sequence, those of a matrix that
// does not fit, and those of a matrix without columns take no step: zeros. A tile ends with its
// sequence, and its stores are predicated by row. A copy of y may reach into the next sequence:
// its rows there become zeros, since 0 times NaN is NaN.
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices_shape.h"
#include "cuda/kernels/gemm/raw_lines.cuh"
#include "cuda/kernels/gemm/shifted.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/tma.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

// kStepK: where matrices are large, longer steps, of longer lines of A; the sums are the same.
template <typename Element_, int kTileN_, bool kTranspose_, int kStepK_ = 32, int kSlots_ = 3,
          int kMinCtas_ = kTileN_ == 256 ? 3 : 4>
struct ArrayWgmmaConfig {
  using Element = Element_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kTileM = 64, kTileN = kTileN_;
  static constexpr int kThreads = 128;
  // Chosen by time on an H100 (docs/performance_log.md).
  static constexpr int kStepK = kStepK_;
  static constexpr int kSlots = kSlots_;
  static constexpr int kMinCtas = kMinCtas_;
};

template <typename Config>
struct ArrayWgmmaStorage {
  using Element = typename Config::Element;
  using YTile = WarpgroupTile<Element, Config::kStepK, Config::kTileN>;
  static constexpr int kLines = Config::kTranspose ? Config::kStepK : Config::kTileM;
  static constexpr int kElems = Config::kTranspose ? Config::kTileM : Config::kStepK;
  static constexpr int kLine = kElems + 8;  // and the granule that a shift needs
  using Fragments = RawLines<Element, kLine, Config::kTranspose>;
  using Shifted = ShiftedTile<Config::kThreads, kLines, kElems, kLine, Element>;

  YTile sY[Config::kSlots];
  alignas(128) Element sGranules[Config::kSlots][kLines * kLine];
  uint64_t full[Config::kSlots];
};

struct ArrayWgmmaParams {
  CUtensorMap y, y_half;  // boxes of kStepK rows, and half as many, and 64 columns
  ArrayJaggedBmmJaggedOutParams product;
  uint32_t interleaved;  // tiles of the result's columns that follow each other in x
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void array_jagged_bmm_jagged_out_wgmma(
    const __grid_constant__ ArrayWgmmaParams launch) {
  using Element = typename Config::Element;
  using Storage = ArrayWgmmaStorage<Config>;
  using YTile = typename Storage::YTile;
  using Shifted = typename Storage::Shifted;
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStepK = Config::kStepK;
  constexpr int kSlots = Config::kSlots, kBlocks = kTileN / 8;
  constexpr bool kTranspose = Config::kTranspose;
  extern __shared__ __align__(1024) char array_wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(array_wgmma_shared_bytes);
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  const MatricesView& matrices = params.matrices;
  start_overlapping();

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.y);
    ptx::prefetch_tensormap(launch.y_half);
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], Config::kThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }
  const uint32_t row_tile = blockIdx.x / launch.interleaved;
  const JaggedTile tile =
      find_tile_narrow<kTileM>(kTranspose ? matrices.columns : matrices.rows, row_tile);
  if (tile.row >= tile.rows.len) return;
  const int rows = static_cast<int>(min(tile.rows.len - tile.row, int64_t{kTileM}));
  const int column = (blockIdx.x % launch.interleaved + blockIdx.y) * kTileN;

  int depth = 0, y_row = 0;
  int64_t pitch = 0;
  bool at_edge = false;
  const Element* gAll = static_cast<const Element*>(params.a);
  const Element* gA = gAll;  // the rows of the tile, or, transposed, its columns
  const Extent tensor{reinterpret_cast<const char*>(gAll),
                      reinterpret_cast<const char*>(gAll + matrices.capacity)};
  if (tile.seq >= 0) {
    const Matrix matrix = find_matrix(matrices, tile.seq);
    pitch = matrix.columns.len;
    if (matrix.fits) {
      const RowRange& summed = kTranspose ? matrix.rows : matrix.columns;
      depth = static_cast<int>(summed.len);
      y_row = static_cast<int>(summed.begin);
      gA += matrix.begin + (kTranspose ? tile.row : tile.row * pitch);
      at_edge = tensor.is_left_by(
          gA, gA + (kTranspose ? (depth - 1) * pitch + rows : (rows - 1) * pitch + depth));
    }
  }
  const int steps = (depth + kStepK - 1) / kStepK;

  const auto start_copies = [&](int step) {
    if (step < steps) {
      const int first = step * kStepK, exist = min(kStepK, depth - first);
      // To start a copy takes a thread some hundred cycles: one of each warp starts its share.
      if (threadIdx.x % 32 == 0) {
        YTile& sY = shared.sY[step % kSlots];
        uint64_t& full = shared.full[step % kSlots];
        const bool half = exist <= kStepK / 2;
        const CUtensorMap& y = half ? launch.y_half : launch.y;
        constexpr int kBox = YTile::kBlockColumns, kWarps = Config::kThreads / 32;
        constexpr int kBoxes = kTileN / kBox;
        static_assert(kBoxes <= kWarps);
        const int box = threadIdx.x / 32;
        const int bytes = kBox * (half ? kStepK / 2 : kStepK) * sizeof(Element);
        ptx::mbarrier_arrive_expect_tx(full, box < kBoxes ? bytes : 0);
        if (box < kBoxes) {
          ptx::cp_async_bulk_tensor_3d(sY.data + box * kBox * kStepK, y, column + box * kBox, 0,
                                       y_row + first, full);
        }
      }
      Shifted::copy(shared.sGranules[step % kSlots], gA + (kTranspose ? first * pitch : first),
                    pitch, kTranspose ? exist : rows, kTranspose ? rows : exist, at_edge, tensor);
    }
    ptx::cp_async_commit();  // an empty group too, so that groups and steps stay in step
  };

  __syncthreads();  // the barriers are initialised
  for (int step = 0; step < kSlots - 1; ++step) start_copies(step);
  const typename Storage::Fragments lines(shared.sGranules[0], gA, pitch);
  jagged_cuda::Accumulator<1, kBlocks> sum = {};
  RoundedSum<kBlocks> rounded;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int slot = step % kSlots, exist = depth - step * kStepK;
    YTile& sY = shared.sY[slot];
    ptx::mbarrier_wait(shared.full[slot], step / kSlots % 2);
    if (exist < kStepK) {
      // Of what was copied: all rows, or the first half.
      const int copied = exist <= kStepK / 2 ? kStepK / 2 : kStepK;
      for (int i = threadIdx.x; i < (copied - exist) * YTile::kChunks; i += Config::kThreads) {
        *reinterpret_cast<uint4*>(sY.chunk(exist + i / YTile::kChunks, i % YTile::kChunks)) =
            make_uint4(0, 0, 0, 0);
      }
      ptx::fence_proxy_async();
    }
    ptx::cp_async_wait<kSlots - 2>();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum[0]);
    if (step > 0 && step % (kSumDepth / kStepK) == 0) rounded.add(sum[0]);
    __syncthreads();
    start_copies(step + kSlots - 1);
    uint32_t a[kStepK / 16][4];
#pragma unroll
    for (int k = 0; k < kStepK; k += 16) {
      lines.load(a[k / 16], slot * static_cast<uint32_t>(sizeof(shared.sGranules[0])), k, exist);
    }
    ptx::wgmma_fence();
    const ptx::MatrixDescriptor y_rows = sY.descriptor();
#pragma unroll
    for (int k = 0; k < kStepK; k += 16) {
      if (k > 0 && k >= exist) break;
      ptx::Wgmma<Element, true>::run(sum[0], a[k / 16], y_rows + YTile::row_step_bytes(k), true);
    }
    ptx::wgmma_commit_group();
  }
  ptx::wgmma_wait_group<0>();
  ptx::fence_operands(sum[0]);
  rounded.finish(sum[0]);

  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16 + lane / 4;
  const float scale[2] = {1.0f, 1.0f};
  attention::store_quads(sum, scale,
                         static_cast<Element*>(params.out) +
                             (tile.rows.begin + tile.row + own_row) * params.columns + column,
                         params.columns, rows - own_row,
                         static_cast<int>(min(params.columns - column, int64_t{kTileN})), lane);
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.array_jagged_bmm_jagged_out") + (Config::kTranspose ? ".transposed" : "") +
    ".wgmma." + kElementName<typename Config::Element>;

template <typename Config>
cudaError_t launch_config(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream,
                          bool interleaves = false) {
  using YTile = typename ArrayWgmmaStorage<Config>::YTile;
  constexpr bool kTranspose = Config::kTranspose;
  const MatricesView& matrices = params.matrices;
  const int64_t y_rows = kTranspose ? matrices.rows.total : matrices.columns.total;
  ArrayWgmmaParams launch_params;
  launch_params.product = params;
  // A tensor without rows is never copied from, but its map must be valid.
  const TensorMapSource source{y_rows > 0 ? params.y : params.out,
                               params.type,
                               y_rows,
                               1,
                               params.columns,
                               params.y_stride,
                               0};
  cudaError_t error =
      encode_tensor_map(launch_params.y, source, Config::kStepK, YTile::kBlockColumns);
  if (error == cudaSuccess) {
    error =
        encode_tensor_map(launch_params.y_half, source, Config::kStepK / 2, YTile::kBlockColumns);
  }
  if (error != cudaSuccess) return error;
  const OffsetsView& rows = kTranspose ? matrices.columns : matrices.rows;
  const int64_t column_tiles = (params.columns + Config::kTileN - 1) / Config::kTileN;
  launch_params.interleaved = interleaves ? static_cast<uint32_t>(column_tiles) : 1;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, Config::kTileM);
  const Grid grid = interleaves ? Grid{tiles * column_tiles} : Grid{tiles, column_tiles};
  if (!grid.is_possible()) return cudaErrorNotSupported;
  return launch_overlapping<array_jagged_bmm_jagged_out_wgmma<Config>>(
      params.overlaps, launch_params, grid, Config::kThreads, sizeof(ArrayWgmmaStorage<Config>),
      stream, kPath<Config>);
}

template <typename Element, bool kTranspose>
cudaError_t launch_columns(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  // Which tile is a matter of time alone: the sums are the same. Chosen by time on an H100
  // (docs/performance_log.md).
  const MatricesView& matrices = params.matrices;
  const OffsetsView& rows = kTranspose ? matrices.columns : matrices.rows;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, 64);
  const MatricesShape shape(matrices.capacity, rows);
  constexpr int64_t kFewTiles = 1024, kFewestTiles = 192;  // all tiles run at once; most SMs idle
  constexpr int64_t kLong = 256, kLonger = 640, kLongest = 1024;
  const bool is_few = tiles < kFewTiles;
  // Few tiles that are alike end together, and lose where an SM holds fewer of them.
  const bool is_uneven = !is_few || tiles < kFewestTiles || shape.skew >= 1.2;
  if (params.columns <= 64) {
    if (shape.row >= kLong && is_uneven) {
      return launch_config<ArrayWgmmaConfig<Element, 64, kTranspose, 64>>(params, stream);
    }
    return launch_config<ArrayWgmmaConfig<Element, 64, kTranspose>>(params, stream);
  }
  if (params.columns <= 128) {
    if (shape.row >= kLong && is_few && is_uneven) {
      return launch_config<ArrayWgmmaConfig<Element, 128, kTranspose, 64, 3, 3>>(params, stream);
    }
    if (shape.row >= (kTranspose || is_few ? kLongest : kLong)) {
      return launch_config<ArrayWgmmaConfig<Element, 128, kTranspose, 64, 2>>(params, stream);
    }
    return launch_config<ArrayWgmmaConfig<Element, 128, kTranspose>>(params, stream);
  }
  if constexpr (!kTranspose) {
    constexpr int64_t kManyTiles = 1536;
    if (tiles >= kManyTiles ? shape.row >= kLonger
                            : is_few && shape.row >= kLong && shape.is_skewed()) {
      return launch_config<ArrayWgmmaConfig<Element, 256, kTranspose, 64, 2, 2>>(params, stream,
                                                                                 true);
    }
  }
  constexpr int64_t kInterleavedTiles = 512;
  const bool interleaves =
      params.columns > 256 && tiles >= kInterleavedTiles && !(kTranspose && shape.row >= kLongest);
  return launch_config<ArrayWgmmaConfig<Element, 256, kTranspose>>(params, stream, interleaves);
}

template <typename Element>
cudaError_t launch_element(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_columns<Element, true>(params, stream)
                          : launch_columns<Element, false>(params, stream);
}

}  // namespace

cudaError_t launch_wgmma(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, stream)
                                           : launch_element<__half>(params, stream);
}

}  // namespace jagged_cuda::gemm
