// jagged_jagged_bmm: z_b = x_b^T y_b for each sequence b. On tensor cores, f32 sums; f64 below.
//
// A = x_b^T [D, L], with stride 1 along M; B = y_b [L, N], with stride 1 along N; K = L is jagged.
// 16 bits with up to 8 columns of one operand go to gemm/weighted_sums.cuh, and Hopper takes those with
// many columns to jagged_jagged_bmm_wgmma.cu. Both cut long sequences (gemm/row_parts.cuh), whose parts
// gemm/add_row_parts.cuh adds. What follows is of the kernel for all others.
//
// Grid: x, one CTA for each sequence and kTileM columns of x (neighbours share a sequence); y,
// parts of N, more than one only where there are few such CTAs. A CTA streams its columns of all
// rows of the sequence through the engine (gemm/engine.cuh), so that with N <= kTileN x is read
// exactly once.
//
// Shared memory and barriers are the engine's. The sum runs over rows in order within one CTA:
// deterministic, and alike in any batch. A sequence without rows gives zeros.
#include "cuda/kernels/gemm/add_row_parts.cuh"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/gemm/f64.cuh"
#include "cuda/kernels/gemm/weighted_sums.cuh"
#include "cuda/kernels/jagged_jagged_bmm.h"
#include "cuda/kernels/prim/launch.cuh"

namespace jagged_cuda {
namespace gemm {

// jagged_jagged_bmm_wgmma.cu; cudaErrorNotSupported where x or y has no tensor map.
cudaError_t launch_wgmma(const JaggedJaggedBmmParams& params, const RowCuts& cuts,
                         cudaStream_t stream);

namespace {

struct JaggedJaggedBmmLaunch {
  JaggedJaggedBmmParams params;
  int64_t tiles_m;       // of D, for each sequence
  int64_t columns_each;  // of N, for each CTA
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_kernel(
    const __grid_constant__ JaggedJaggedBmmLaunch launch) {
  using Element = typename Config::Element;
  static_assert(Config::kLayoutA == Layout::kAcross && Config::kLayoutB == Layout::kAcross,
                "the rows of x and y are contiguous");
  const JaggedJaggedBmmParams& params = launch.params;
  ptx::griddepcontrol_launch_dependents();  // the product behind it in a backward pass

  const int64_t seq = blockIdx.x / launch.tiles_m;
  const int64_t first = (blockIdx.x - seq * launch.tiles_m) * Config::kTileM;  // column of x
  const RowRange range = sequence_rows(params.offsets, seq);
  const int rows = clamp_extent(params.rows - first, Config::kTileM);
  const int64_t begin = blockIdx.y * launch.columns_each;
  const int64_t end = min(begin + launch.columns_each, params.columns);
  Element* gOut = static_cast<Element*>(params.out) +
                  (seq * params.rows + first) * params.columns;  // [rows, N]

  const Operand<Element> x{
      static_cast<const Element*>(params.x) + range.begin * params.x_stride + first,
      params.x_stride, params.x_vectors};  // [rows, L]
  const Operand<Element> y{static_cast<const Element*>(params.y) + range.begin * params.y_stride,
                           params.y_stride, params.y_vectors};  // [L, N]
  multiply<Config>(shared_storage<Config>(), x, y, rows, begin, end, range.len,
                   [&](const Accumulator<Config>& rAcc, int row, int column, int64_t n) {
                     store_tile<Config>(rAcc, gOut + n, params.columns, row, column, rows,
                                        clamp_extent(end - n, Config::kTileN));
                   });
}

template <typename Config>
constexpr PathName kPath = PathName("cuda.jagged_jagged_bmm.mma_sync.") + Config::Math::kName;

template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  const int64_t tiles_m = (params.rows + Config::kTileM - 1) / Config::kTileM;
  const int64_t row_tiles = params.offsets.num_seqs * tiles_m;
  const ColumnSplit split = split_columns(params.columns, Config::kTileN, row_tiles);
  return launch<jagged_jagged_bmm_kernel<Config>>(
      JaggedJaggedBmmLaunch{params, tiles_m, split.columns_each}, {row_tiles, split.parts},
      Config::kThreads, sizeof(SharedStorage<Config>), stream, kPath<Config>);
}

// With N <= 8 the product is a stream of x: 128 columns of x are 512 bytes of f32 from each row,
// three stages of 18 KB leave room for four CTAs per SM, some 130 KB in flight. Wider tiles are
// bound by shared memory and registers.
template <typename Math>
cudaError_t launch_math(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  const auto with = [&](auto tile) {
    return launch_config<Config<Math, decltype(tile), Layout::kAcross, Layout::kAcross>>(params,
                                                                                         stream);
  };
  if (params.columns <= 8) return with(Tile<128, 8, 4, 1, 3>{});
  if (params.columns <= 32) return with(Tile<64, 32, 4, 1, 4>{});
  return with(Tile<64, 64, 2, 2, 3>{});
}

// f64 in tiles of 16 x 16 (gemm/f64.cuh: mapping, shared memory, barriers). Grid: x, sequences
// times tiles of D; each CTA walks N in steps of 16. A sequence without rows gives zeros.
__global__ __launch_bounds__(kThreadsF64) void jagged_jagged_bmm_f64_kernel(
    const __grid_constant__ JaggedJaggedBmmLaunch launch) {
  const JaggedJaggedBmmParams& params = launch.params;
  const int64_t seq = blockIdx.x / launch.tiles_m;
  const int64_t first = (blockIdx.x - seq * launch.tiles_m) * kTileF64;  // column of x
  const RowRange range = sequence_rows(params.offsets, seq);
  const double* gX = static_cast<const double*>(params.x) + range.begin * params.x_stride + first;
  const double* gY = static_cast<const double*>(params.y) + range.begin * params.y_stride;
  const int row = threadIdx.x / kTileF64, column = threadIdx.x % kTileF64;
  for (int64_t n = 0; n < params.columns; n += kTileF64) {
    const double sum = multiply_f64({gX, 1, params.x_stride}, {gY + n, params.y_stride, 1},
                                    params.rows - first, params.columns - n, range.len);
    if (first + row < params.rows && n + column < params.columns) {
      static_cast<double*>(
          params.out)[(seq * params.rows + first + row) * params.columns + n + column] = sum;
    }
  }
}

cudaError_t launch_f64(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  const int64_t tiles_m = (params.rows + kTileF64 - 1) / kTileF64;
  return launch<jagged_jagged_bmm_f64_kernel>(
      JaggedJaggedBmmLaunch{params, tiles_m, params.columns}, {params.offsets.num_seqs * tiles_m},
      kThreadsF64, 0, stream, "cuda.jagged_jagged_bmm.fma.f64");
}

// Whether the product runs on wgmma: with few columns of both operands the engine is as fast
// (docs/performance_log.md).
bool takes_wgmma(const JaggedJaggedBmmParams& params) {
  const bool is_large =
      (params.columns >= 128 && params.rows >= 32) || (params.columns >= 16 && params.rows >= 512);
  constexpr int64_t kMaxExtent = 1 << 20;
  const auto copyable = [&](int64_t columns, int64_t stride, bool vectors) {
    return vectors && columns <= kMaxExtent && (params.offsets.total <= 1 || stride >= columns);
  };
  return is_large && is_16_bit(params.type) && !params.mma_sync_only &&
         RowCuts::is_possible(params.offsets, params.rows * params.columns) &&
         copyable(params.rows, params.x_stride, params.x_vectors) &&
         copyable(params.columns, params.y_stride, params.y_vectors) && has_wgmma();
}

// As few cuts as make partial sums half as large as the rows that they come from. A part has at most
// kSumDepth rows (attention/wgmma_tile.cuh), so of matrices with D N / (D + N) > 512 partial sums are
// larger: as large as the rows if D = N = 2,048, twice as large if D = N = 4,096.
RowCuts wgmma_cuts(const JaggedJaggedBmmParams& params) {
  constexpr int64_t kRows = 1024, kMostRows = 4096;
  // Two slots of 4 bytes for each element of a matrix and each slab, half of 2 (D + N) bytes for a row.
  const int64_t enough = 8 * params.rows * params.columns / (params.rows + params.columns);
  return RowCuts(params.offsets,
                 static_cast<int>(std::min((enough + kRows - 1) / kRows * kRows, kMostRows)),
                 params.rows * params.columns);
}

// How a product is computed. Which kernel, and where it cuts sequences, follows from D, N, the type
// and how rows lie.
enum class Route { kEngine, kWeightedSums, kWgmma };

Route route_of(const JaggedJaggedBmmParams& params) {
  if (weighted_operand(params) != WeightedOperand::kNone) return Route::kWeightedSums;
  return takes_wgmma(params) ? Route::kWgmma : Route::kEngine;
}

RowCuts cuts_of(const JaggedJaggedBmmParams& params, Route route) {
  return route == Route::kWgmma ? wgmma_cuts(params) : weighted_cuts(params);
}

}  // namespace
}  // namespace gemm

int64_t num_partial_sums(const JaggedJaggedBmmParams& params) {
  const gemm::Route route = gemm::route_of(params);
  if (route == gemm::Route::kEngine) return 0;
  return gemm::cuts_of(params, route).words();
}

cudaError_t launch_jagged_jagged_bmm(const JaggedJaggedBmmParams& params, cudaStream_t stream) {
  if (params.type == ElementType::kF64) return gemm::launch_f64(params, stream);
  const gemm::Route route = gemm::route_of(params);
  if (route != gemm::Route::kEngine) {
    const gemm::RowCuts cuts = gemm::cuts_of(params, route);
    const cudaError_t error = route == gemm::Route::kWgmma
                                  ? gemm::launch_wgmma(params, cuts, stream)
                                  : gemm::launch_weighted_sums(params, cuts, stream);
    if (error == cudaSuccess && cuts.slabs > 0) {
      const gemm::AddRowPartsParams sums{params.partial, params.out, params.offsets, cuts};
      return params.type == ElementType::kBf16
                 ? gemm::launch_add_row_parts<__nv_bfloat16>(sums, stream)
                 : gemm::launch_add_row_parts<__half>(sums, stream);
    }
    if (error != cudaErrorNotSupported) return error;
  }
  return gemm::with_math(
      params.type, [&](auto math) { return gemm::launch_math<decltype(math)>(params, stream); });
}

}  // namespace jagged_cuda
