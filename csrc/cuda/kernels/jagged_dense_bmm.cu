// jagged_dense_bmm: z_b = activation(x_b y_b + bias_b) for each sequence b. On tensor cores, f32
// sums; bias and activation follow in registers (gemm/epilogue.cuh). f64 below.
//
// A = x_b [L, D], jagged along M and with stride 1 along K; B = y_b [D, N] with stride 1 along
// either. With few terms per sum, or few columns, other kernels take it (gemm/outer.cuh,
// gemm/thin.cuh, gemm/few_columns.cuh), and Hopper takes 16 bits to jagged_dense_bmm_wgmma.cu where
// that serves.
//
// Grid: x, one CTA for each virtual tile of kTileM rows (prim/jagged.cuh: T / kTileM + B + 2 of
// them); y, parts of N, more than one only where there are few rows. A CTA finds its tile with a
// binary search over offsets, streams the tile's rows of x once, K = D being walked by the engine
// (gemm/engine.cuh), and y_b from L2.
//
// Shared memory and barriers are the engine's. Virtual tiles without rows return at once; rows
// outside every sequence become zeros; a tile ends with its sequence, and its stores are predicated
// by row.
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/f64.cuh"
#include "cuda/kernels/gemm/few_columns.cuh"
#include "cuda/kernels/gemm/outer.cuh"
#include "cuda/kernels/gemm/thin.cuh"
#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"

namespace jagged_cuda {
namespace gemm {

// jagged_dense_bmm_wgmma.cu; cudaErrorNotSupported where x or y has no tensor map.
cudaError_t launch_wgmma(const JaggedDenseBmmParams& params, cudaStream_t stream);

namespace {

struct JaggedDenseBmmLaunch {
  JaggedDenseBmmParams params;
  int64_t columns_each;  // of N, for each CTA
};

// Zeros in `rows` rows of kThreads threads' result, columns [begin, end).
template <int kThreads, typename Element>
__device__ void store_zero_rows(Element* global, int64_t stride, int rows, int64_t begin,
                                int64_t end) {
  for (int row = 0; row < rows; ++row) {
    for (int64_t column = begin + threadIdx.x; column < end; column += kThreads) {
      global[row * stride + column] = Element(0.0f);
    }
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_dense_bmm_kernel(
    const __grid_constant__ JaggedDenseBmmLaunch launch) {
  using Element = typename Config::Element;
  constexpr int kTileM = Config::kTileM;
  static_assert(Config::kLayoutA == Layout::kAlongK, "the rows of x are contiguous");
  const JaggedDenseBmmParams& params = launch.params;
  start_overlapping();

  const JaggedTile tile = find_any_tile<kTileM>(params.offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = clamp_extent(tile.rows.len - tile.row, kTileM);
  const int64_t global_row = tile.rows.begin + tile.row;
  const int64_t begin = blockIdx.y * launch.columns_each;
  const int64_t end = min(begin + launch.columns_each, params.columns);
  Element* gOut = static_cast<Element*>(params.out) + global_row * params.columns;  // [rows, N]
  if (tile.seq < 0) {
    store_zero_rows<Config::kThreads>(gOut, params.columns, rows, begin, end);
    return;
  }

  const Operand<Element> x{static_cast<const Element*>(params.x) + global_row * params.x_stride,
                           params.x_stride, params.x_vectors};  // [rows, D]
  const Operand<Element> y{static_cast<const Element*>(params.y) + tile.seq * params.y_seq_stride,
                           params.y_stride, params.y_vectors};      // [D, N]
  const Element* gBias = static_cast<const Element*>(params.bias);  // [B, N] or null
  if (gBias != nullptr) gBias += tile.seq * params.bias_stride;
  const Epilogue<Element> epilogue{gBias, params.activation};
  multiply<Config>(shared_storage<Config>(), x, y, rows, begin, end, params.inner,
                   [&](Accumulator<Config>& rAcc, int row, int column, int64_t n) {
                     if (epilogue.exists()) {
                       apply_epilogue<Config>(rAcc, epilogue, n, column,
                                              clamp_extent(end - n, Config::kTileN));
                     }
                     store_tile<Config>(rAcc, gOut + n, params.columns, row, column, rows,
                                        clamp_extent(end - n, Config::kTileN));
                   });
}

template <typename Config>
constexpr PathName kPath = PathName("cuda.jagged_dense_bmm.mma_sync.") + Config::Math::kName;

template <typename Config>
cudaError_t launch_config(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, Config::kTileM);
  const ColumnSplit split = split_columns(params.columns, Config::kTileN, tiles);
  return launch_overlapping<jagged_dense_bmm_kernel<Config>>(
      params.overlaps, JaggedDenseBmmLaunch{params, split.columns_each}, {tiles, split.parts},
      Config::kThreads, sizeof(SharedStorage<Config>), stream, kPath<Config>);
}

// 64 rows: sequences are short, and a tile that a sequence does not fill costs shared memory, not
// bandwidth. N picks the width; with N <= 8 the product is a stream of x, and four stages of 10 KB
// leave room for five CTAs per SM, some 90 KB in flight. Wider tiles are bound by shared memory and
// registers.
template <typename Math, Layout kLayoutY>
cudaError_t launch_tile(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const auto with = [&](auto tile) {
    return launch_config<Config<Math, decltype(tile), Layout::kAlongK, kLayoutY>>(params, stream);
  };
  if (params.columns <= 8) return with(Tile<64, 8, 4, 1, 4>{});
  if (params.columns <= 32) return with(Tile<64, 32, 4, 1, 4>{});
  return with(Tile<64, 64, 2, 2, 3>{});
}

template <typename Math>
cudaError_t launch_math(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  return params.y_along_inner ? launch_tile<Math, Layout::kAlongK>(params, stream)
                              : launch_tile<Math, Layout::kAcross>(params, stream);
}

// f64 in tiles of 16 rows (gemm/f64.cuh: mapping, shared memory, barriers). Grid: x, the virtual
// tiles of 16 rows; each CTA walks N in steps of 16. Empty tiles return at once, rows outside every
// sequence become zeros, as they are a product with K = 0.
__global__ __launch_bounds__(kThreadsF64) void jagged_dense_bmm_f64_kernel(
    const __grid_constant__ JaggedDenseBmmParams params) {
  const JaggedTile tile = find_tile<kTileF64>(params.offsets, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int64_t rows = tile.rows.len - tile.row, global_row = tile.rows.begin + tile.row;
  const int64_t depth = tile.seq < 0 ? 0 : params.inner;
  const double* gX = static_cast<const double*>(params.x) + global_row * params.x_stride;
  const double* gY = static_cast<const double*>(params.y) + tile.seq * params.y_seq_stride;
  const int64_t along_k = params.y_along_inner ? 1 : params.y_stride;
  const int64_t along_n = params.y_along_inner ? params.y_stride : 1;
  const int row = threadIdx.x / kTileF64, column = threadIdx.x % kTileF64;
  for (int64_t n = 0; n < params.columns; n += kTileF64) {
    const double sum = multiply_f64({gX, params.x_stride, 1}, {gY + n * along_n, along_k, along_n},
                                    rows, params.columns - n, depth);
    if (row < rows && n + column < params.columns) {
      double result[1] = {};
      if (tile.seq >= 0) {
        const double* gBias = static_cast<const double*>(params.bias);
        const double bias =
            gBias != nullptr ? gBias[tile.seq * params.bias_stride + n + column] : 0.0;
        result[0] = sum + bias;
        activate(result, params.activation);
      }
      static_cast<double*>(params.out)[(global_row + row) * params.columns + n + column] =
          result[0];
    }
  }
}

cudaError_t launch_f64(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  const int64_t tiles = num_tiles(params.offsets.total, params.offsets.num_seqs, kTileF64);
  return launch<jagged_dense_bmm_f64_kernel>(params, {tiles}, kThreadsF64, 0, stream,
                                             "cuda.jagged_dense_bmm.fma.f64");
}

// Whether the engine takes few columns: at D = 256 it sums alike (gemm/few_columns.cuh; products of 16
// terms do not depend on their order on such a GPU), and is faster where sequences are not short, nor very
// many.
bool leaves_few_columns(const JaggedDenseBmmParams& params) {
  constexpr int64_t kMinMean = 48, kMaxSeqs = 16'384;
  const OffsetsView& offsets = params.offsets;
  return params.inner == 256 && params.columns == 8 && offsets.num_seqs <= kMaxSeqs &&
         offsets.total >= kMinMean * offsets.num_seqs && has_wgmma();
}

// Whether the product runs on wgmma.
bool takes_wgmma(const JaggedDenseBmmParams& params) {
  // Where it was faster on an H100 (docs/performance_log.md).
  constexpr int64_t kMinInner = 32, kMinColumns = 64, kFewColumns = 128, kMaxInnerOfFew = 128;
  constexpr int64_t kMaxSize = 1 << 20;
  constexpr int64_t kMaxRows = int64_t{1} << 30, kMaxTiles = kMaxRows;  // of the search
  const OffsetsView& offsets = params.offsets;
  const int64_t lines = params.y_along_inner ? params.columns : params.inner,
                line = params.y_along_inner ? params.inner : params.columns;
  // Lines that overlap have no tensor map.
  const auto is_apart = [](int64_t count, int64_t stride, int64_t elems) {
    return count <= 1 || stride >= elems;
  };
  return is_16_bit(params.type) && !params.mma_sync_only && params.x_vectors && params.y_vectors &&
         params.inner >= kMinInner && params.columns >= kMinColumns &&
         (params.columns > kFewColumns || params.inner <= kMaxInnerOfFew) &&
         params.columns % 8 == 0 && params.columns <= kMaxSize && params.inner % 8 == 0 &&
         params.inner <= kMaxSize && offsets.total < kMaxRows && offsets.num_seqs > 0 &&
         offsets.num_seqs < kMaxRows &&
         num_tiles(offsets.total, offsets.num_seqs, 64) < kMaxTiles / (params.columns / 64 + 1) &&
         is_apart(offsets.total, params.x_stride, params.inner) &&
         is_apart(lines, params.y_stride, line) &&
         is_apart(offsets.num_seqs, params.y_seq_stride, line) && has_wgmma();
}

}  // namespace
}  // namespace gemm

cudaError_t launch_jagged_dense_bmm(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  if (params.type == ElementType::kF64) return gemm::launch_f64(params, stream);
  if (gemm::is_outer(params)) return gemm::launch_outer(params, stream);
  if (gemm::is_thin(params)) return gemm::launch_thin(params, stream);
  if (gemm::is_few_columns(params) && !gemm::leaves_few_columns(params))
    return gemm::launch_few_columns(params, stream);
  if (gemm::takes_wgmma(params)) {
    const cudaError_t error = gemm::launch_wgmma(params, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return gemm::with_math(
      params.type, [&](auto math) { return gemm::launch_math<decltype(math)>(params, stream); });
}

}  // namespace jagged_cuda
