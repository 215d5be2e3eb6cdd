// array_jagged_bmm_jagged_out: z_b = A_b y_b, or A_b^T y_b, for each sequence b. On mma.sync, f32
// sums; f64 below. Hopper takes 16 bits to array_jagged_bmm_jagged_out_wgmma.cu and f32 to
// array_jagged_bmm_jagged_out_f32_wgmma.cu where these serve.
//
// A = A_b [Lx, Ly], jagged along M and K, with stride 1 along K and the pitch Ly, or, transposed,
// A_b^T [Ly, Lx] with stride 1 along M. B = y_b with stride 1 along N. A matrix begins at any
// element, so its lines are not aligned as a rule: f32 goes through cp.async of 4 bytes, 16 bits
// through aligned granules that are shifted in shared memory (gemm/shifted.cuh). Where a matrix and
// its pitch happen to be aligned, cp.async of 16 bytes serves.
//
// Grid: x, one CTA for each virtual tile of kTileM rows of the result (prim/jagged.cuh: T / kTileM
// + B + 2 of them); y, parts of N, more than one only where there are few rows. A CTA finds its
// tile with a binary search over offsets; for each tile of N it streams its rows of A_b, from
// memory once and then from L2, and y_b (gemm/engine.cuh).
//
// Shared memory and barriers are the engine's: for Tile<64, 128> and f32, 3 x (64 x 144 + 32 x
// 544) = 79,872 bytes, two CTAs per SM. The sum runs over a sequence's rows in order within one
// CTA: deterministic, and alike in any batch.
//
// Virtual tiles without rows return at once. Rows outside every sequence, those of a matrix that
// does not fit, and those of a matrix without columns are products with K = 0, which are zeros and
// read nothing. A tile ends with its sequence, and its stores are predicated by row.
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/gemm/f64.cuh"
#include "cuda/kernels/prim/launch.cuh"

#include <limits>

namespace jagged_cuda {
namespace gemm {

// array_jagged_bmm_jagged_out_wgmma.cu, _f32_wgmma.cu; cudaErrorNotSupported where y has no tensor
// map.
cudaError_t launch_wgmma(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream);
cudaError_t launch_f32_wgmma(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream);

namespace {

struct ArrayJaggedBmmJaggedOutLaunch {
  ArrayJaggedBmmJaggedOutParams params;
  int64_t columns_each;  // of N, for each CTA
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void array_jagged_bmm_jagged_out_kernel(
    const __grid_constant__ ArrayJaggedBmmJaggedOutLaunch launch) {
  using Element = typename Config::Element;
  constexpr int kTileM = Config::kTileM;
  constexpr bool kTranspose = Config::kLayoutA == Layout::kAcross;
  static_assert(Config::kLayoutB == Layout::kAcross, "the rows of y are contiguous");
  const ArrayJaggedBmmJaggedOutParams& params = launch.params;
  const MatricesView& matrices = params.matrices;

  const JaggedTile tile =
      find_tile<kTileM>(kTranspose ? matrices.columns : matrices.rows, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int rows = clamp_extent(tile.rows.len - tile.row, kTileM);
  const int64_t begin = blockIdx.y * launch.columns_each;
  const int64_t end = min(begin + launch.columns_each, params.columns);
  Element* gOut = static_cast<Element*>(params.out) +
                  (tile.rows.begin + tile.row) * params.columns;  // [rows, N]

  int64_t depth = 0;
  const Element* gA = static_cast<const Element*>(params.a);
  UnalignedOperand<Element> a;  // [rows, depth]
  a.tensor = {reinterpret_cast<const char*>(gA),
              reinterpret_cast<const char*>(gA + matrices.capacity)};
  a.data = gA, a.stride = 0, a.vectors = false, a.at_edge = true;
  Operand<Element> y{static_cast<const Element*>(params.y), params.y_stride,
                     params.y_vectors};  // [depth, N]
  if (tile.seq >= 0) {
    const Matrix matrix = find_matrix(matrices, tile.seq);
    const int64_t pitch = matrix.columns.len;
    if (matrix.fits) {
      depth = kTranspose ? matrix.rows.len : pitch;
      const Element* gMatrix = gA + matrix.begin;
      a.data = gMatrix + (kTranspose ? tile.row : tile.row * pitch);
      a.stride = pitch;
      a.vectors =
          reinterpret_cast<uintptr_t>(gMatrix) % 16 == 0 && pitch * sizeof(Element) % 16 == 0;
      const int64_t last = kTranspose ? (depth - 1) * pitch + rows : (rows - 1) * pitch + depth;
      a.at_edge = a.tensor.is_left_by(a.data, a.data + last);
      y.data += (kTranspose ? matrix.rows.begin : matrix.columns.begin) * params.y_stride;
    }
  }
  multiply<Config>(shared_storage<Config>(), a, y, rows, begin, end, depth,
                   [&](const Accumulator<Config>& rAcc, int row, int column, int64_t n) {
                     store_tile<Config>(rAcc, gOut + n, params.columns, row, column, rows,
                                        clamp_extent(end - n, Config::kTileN));
                   });
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.array_jagged_bmm_jagged_out") +
    (Config::kLayoutA == Layout::kAcross ? ".transposed" : "") + ".mma_sync." + Config::Math::kName;

template <typename Config>
cudaError_t launch_config(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const MatricesView& matrices = params.matrices;
  const OffsetsView& rows = params.transpose ? matrices.columns : matrices.rows;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, Config::kTileM);
  const ColumnSplit split = split_columns(params.columns, Config::kTileN, tiles);
  return launch<array_jagged_bmm_jagged_out_kernel<Config>>(
      ArrayJaggedBmmJaggedOutLaunch{params, split.columns_each}, {tiles, split.parts},
      Config::kThreads, sizeof(SharedStorage<Config>), stream, kPath<Config>);
}

// 64 rows, since sequences are short. N picks the width; wide tiles spare a second walk over A_b.
// The compensated sums of F32 take half as many registers again: no more than 64 columns there.
// 16-bit elements wait in registers too: eight warps share what four could not hold.
template <typename Math, Layout kLayoutA>
cudaError_t launch_tile(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const auto with = [&](auto tile) {
    return launch_config<Config<Math, decltype(tile), kLayoutA, Layout::kAcross>>(params, stream);
  };
  if (params.columns <= 32) return with(Tile<64, 32, 4, 1, 4>{});
  if constexpr (!Math::kCompensated) {
    // 16-bit elements in two stages: the granules of the next one wait in registers besides.
    constexpr int kStages = sizeof(typename Math::Element) == 2 ? 2 : 3;
    if (params.columns > 64) return with(Tile<64, 128, 2, 4, kStages>{});
  }
  return with(std::conditional_t<sizeof(typename Math::Element) == 2, Tile<64, 64, 4, 2, 3>,
                                 Tile<64, 64, 2, 2, 3>>{});
}

template <typename Math>
cudaError_t launch_math(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_tile<Math, Layout::kAcross>(params, stream)
                          : launch_tile<Math, Layout::kAlongK>(params, stream);
}

// f64 in tiles of 16 rows (gemm/f64.cuh: mapping, shared memory, barriers). Grid: x, the virtual
// tiles of 16 rows of the result; each CTA walks N in steps of 16. Empty tiles return at once; rows
// outside every sequence, and those of a matrix that does not fit, become zeros, as they are a
// product with K = 0.
__global__ __launch_bounds__(kThreadsF64) void array_jagged_bmm_jagged_out_f64_kernel(
    const __grid_constant__ ArrayJaggedBmmJaggedOutParams params) {
  const MatricesView& matrices = params.matrices;
  const bool transpose = params.transpose;
  const JaggedTile tile =
      find_tile<kTileF64>(transpose ? matrices.columns : matrices.rows, blockIdx.x);
  if (tile.row >= tile.rows.len) return;
  const int64_t rows = tile.rows.len - tile.row, global_row = tile.rows.begin + tile.row;
  int64_t depth = 0;
  OperandF64 a{static_cast<const double*>(params.a), 0, 0};
  OperandF64 y{static_cast<const double*>(params.y), params.y_stride, 1};
  if (tile.seq >= 0) {
    const Matrix matrix = find_matrix(matrices, tile.seq);
    const int64_t pitch = matrix.columns.len;
    if (matrix.fits) {
      depth = transpose ? matrix.rows.len : pitch;
      a.line_stride = transpose ? 1 : pitch;
      a.elem_stride = transpose ? pitch : 1;
      a.data += matrix.begin + tile.row * a.line_stride;
      y.data += (transpose ? matrix.rows.begin : matrix.columns.begin) * params.y_stride;
    }
  }
  double* gOut = static_cast<double*>(params.out) + global_row * params.columns;
  const int row = threadIdx.x / kTileF64, column = threadIdx.x % kTileF64;
  for (int64_t n = 0; n < params.columns; n += kTileF64) {
    const double sum = multiply_f64(a, y, rows, params.columns - n, depth);
    if (row < rows && n + column < params.columns) gOut[row * params.columns + n + column] = sum;
    y.data += kTileF64;
  }
}

cudaError_t launch_f64(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const MatricesView& matrices = params.matrices;
  const OffsetsView& rows = params.transpose ? matrices.columns : matrices.rows;
  const int64_t tiles = num_tiles(rows.total, rows.num_seqs, kTileF64);
  return launch<array_jagged_bmm_jagged_out_f64_kernel>(
      params, {tiles}, kThreadsF64, 0, stream,
      params.transpose ? "cuda.array_jagged_bmm_jagged_out.transposed.fma.f64"
                       : "cuda.array_jagged_bmm_jagged_out.fma.f64");
}

// Whether the product runs on wgmma.
bool takes_wgmma(const ArrayJaggedBmmJaggedOutParams& params) {
  // Half of wgmma's smallest tile, or less, is as fast without it.
  const bool is_short = is_16_bit(params.type);
  const int64_t min_columns = is_short ? 33 : 65;  // of f32 one tile has 128
  constexpr int64_t kMaxColumns = 1 << 20;
  constexpr int64_t kMaxRows = std::numeric_limits<int>::max() / 2;  // coordinates of copies
  const int64_t rows = params.matrices.rows.total, columns = params.matrices.columns.total;
  const int64_t y_rows = params.transpose ? rows : columns;
  const int64_t vector = is_short ? 8 : 4;  // elements of 16 bytes
  return !params.mma_sync_only && params.y_vectors && params.columns % vector == 0 &&
         params.columns >= min_columns && params.columns <= kMaxColumns && rows <= kMaxRows &&
         columns <= kMaxRows && (y_rows <= 1 || params.y_stride >= params.columns) && has_wgmma();
}

}  // namespace
}  // namespace gemm

cudaError_t launch_array_jagged_bmm_jagged_out(const ArrayJaggedBmmJaggedOutParams& params,
                                               cudaStream_t stream) {
  if (params.type == ElementType::kF64) return gemm::launch_f64(params, stream);
  if (gemm::takes_wgmma(params)) {
    const cudaError_t error = is_16_bit(params.type) ? gemm::launch_wgmma(params, stream)
                                                     : gemm::launch_f32_wgmma(params, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return gemm::with_math(
      params.type, [&](auto math) { return gemm::launch_math<decltype(math)>(params, stream); });
}

}  // namespace jagged_cuda
