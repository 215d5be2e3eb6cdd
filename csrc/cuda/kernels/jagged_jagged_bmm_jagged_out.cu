// jagged_jagged_bmm_jagged_out: choice of the kernel, and those that every GPU has: z_b = x_b y_b^T
// for each sequence b, on mma.sync with f32 sums, or in f64 (gemm/f64.cuh). The one on wgmma is in
// jagged_jagged_bmm_jagged_out_wgmma.cu.
//
// A = x_b [Lx, D], B = y_b^T [D, Ly], both with stride 1 along K; C = z_b [Lx, Ly], jagged along M
// and N, with the pitch Ly, at any element of the result.
//
// Grid: x, one CTA for each virtual tile of kTileM rows of x (prim/jagged.cuh: Tx / kTileM + B + 2
// of them), then some that write zeros where there is no matrix (gemm/matrices.cuh); y, parts of N,
// more than one only where there are few rows. A CTA finds its tile with a binary search over offsets
// and walks the tiles of its sequence's columns, K = D being walked by the engine (gemm/engine.cuh); x
// comes from memory once, and again, as y does, from L2.
//
// Shared memory and barriers are the engine's, and for each warp 8 rows of its part of C, of which
// it makes runs of 32 elements (gemm/matrices.cuh; __syncwarp): Tile<64, 128> has three stages of
// 64 x 144 + 128 x 144 bytes and 8 x 8 x 40 elements beside them, in all 93,208 bytes for f32: two
// CTAs per SM on Hopper, and one where a CTA may have no more than 99 KiB.
//
// Virtual tiles without rows, rows outside every sequence and matrices that do not fit return at
// once, as does a sequence without columns; a tile ends with its sequence in both directions, and
// its stores are predicated.
#include "cuda/kernels/gemm/f64.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/launch.cuh"

#include <limits>

namespace jagged_cuda {
namespace gemm {

// jagged_jagged_bmm_jagged_out_wgmma.cu; cudaErrorNotSupported where x or y has no tensor map.
cudaError_t launch_wgmma(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream);

namespace {

struct JaggedJaggedBmmJaggedOutLaunch {
  JaggedJaggedBmmJaggedOutParams params;
  int64_t row_tiles;
};

// What storing needs and the products do not: kept out of registers.
struct Target {
  int64_t first;  // element of the result at which the tile, [rows, pitch], begins
  int64_t pitch;
  int rows;
};

template <typename Config>
struct MatrixStorage {
  SharedStorage<Config> ring;
  WarpRows<Config> warps[Config::kThreads / 32];
  Target target;
};

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_jagged_out_kernel(
    const __grid_constant__ JaggedJaggedBmmJaggedOutLaunch launch) {
  using Element = typename Config::Element;
  constexpr int kTileM = Config::kTileM;
  static_assert(Config::kLayoutA == Layout::kAlongK && Config::kLayoutB == Layout::kAlongK,
                "the rows of x and y are contiguous");
  const JaggedJaggedBmmJaggedOutParams& params = launch.params;
  Element* gOut = static_cast<Element*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    const int64_t part = blockIdx.x - launch.row_tiles, parts = gridDim.x - launch.row_tiles;
    if (blockIdx.y == 0) zero_outside<Config::kThreads>(params.matrices, gOut, part, parts);
    return;
  }

  const JaggedTile tile = find_tile<kTileM>(params.matrices.rows, blockIdx.x);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const Matrix matrix = find_matrix(params.matrices, tile.seq);
  const int64_t pitch = matrix.columns.len;
  // The tiles of the sequence's columns are shared by the parts.
  constexpr int kTileN = Config::kTileN;
  const int64_t each = gridDim.y == 1 ? pitch : (pitch / kTileN + gridDim.y) / gridDim.y * kTileN;
  const int64_t begin = blockIdx.y * each;
  const int64_t end = min(begin + each, pitch);
  if (!matrix.fits || begin >= end) return;
  const int rows = clamp_extent(tile.rows.len - tile.row, kTileM);
  MatrixStorage<Config>& shared = shared_memory<MatrixStorage<Config>>();
  // Read after the first barrier of the engine.
  if (threadIdx.x == 0) shared.target = {matrix.begin + tile.row * pitch, pitch, rows};

  const Operand<Element> x{
      static_cast<const Element*>(params.x) + (tile.rows.begin + tile.row) * params.x_stride,
      params.x_stride, params.x_vectors};  // [rows, D]
  const Operand<Element> y{
      static_cast<const Element*>(params.y) + matrix.columns.begin * params.y_stride,
      params.y_stride, params.y_vectors};  // [Ly, D]
  multiply<Config>(shared.ring, x, y, rows, begin, end, params.inner,
                   [&](const Accumulator<Config>& rAcc, int row, int column, int64_t n) {
                     const Target& target = shared.target;
                     store_rows<Config>(rAcc, shared.warps[threadIdx.x / 32],
                                        gOut + target.first + n, target.pitch, row, column,
                                        target.rows, clamp_extent(end - n, Config::kTileN));
                   });
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.jagged_jagged_bmm_jagged_out.mma_sync.") + Config::Math::kName;

template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView& rows = params.matrices.rows;
  const int64_t row_tiles = num_tiles(rows.total, rows.num_seqs, Config::kTileM);
  const ColumnSplit split = split_columns(params.matrices.columns.total, Config::kTileN, row_tiles);
  const int64_t ctas = row_tiles + num_zero_ctas(params.matrices.capacity);
  return launch<jagged_jagged_bmm_jagged_out_kernel<Config>>(
      JaggedJaggedBmmJaggedOutLaunch{params, row_tiles}, {ctas, split.parts}, Config::kThreads,
      sizeof(MatrixStorage<Config>), stream, kPath<Config>);
}

// 64 rows, since sequences are short, and as many columns as spare most of them a second walk over
// x. The compensated sums of F32 take half as many registers again: fewer columns there.
template <typename Math>
cudaError_t launch_math(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  using Tile =
      std::conditional_t<Math::kCompensated, Tile<64, 64, 2, 2, 3>, Tile<64, 128, 2, 4, 3>>;
  return launch_config<Config<Math, Tile, Layout::kAlongK, Layout::kAlongK>>(params, stream);
}

__global__ __launch_bounds__(kThreadsF64) void jagged_jagged_bmm_jagged_out_f64_kernel(
    const __grid_constant__ JaggedJaggedBmmJaggedOutLaunch launch) {
  const JaggedJaggedBmmJaggedOutParams& params = launch.params;
  double* gOut = static_cast<double*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    zero_outside<kThreadsF64>(params.matrices, gOut, blockIdx.x - launch.row_tiles,
                              gridDim.x - launch.row_tiles);
    return;
  }
  const JaggedTile tile = find_tile<kTileF64>(params.matrices.rows, blockIdx.x);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const Matrix matrix = find_matrix(params.matrices, tile.seq);
  if (!matrix.fits) return;
  const int64_t rows = tile.rows.len - tile.row, pitch = matrix.columns.len;
  const double* gX =
      static_cast<const double*>(params.x) + (tile.rows.begin + tile.row) * params.x_stride;
  const double* gY = static_cast<const double*>(params.y) + matrix.columns.begin * params.y_stride;
  gOut += matrix.begin + tile.row * pitch;
  const int row = threadIdx.x / kTileF64, column = threadIdx.x % kTileF64;
  for (int64_t n = 0; n < pitch; n += kTileF64) {
    const double sum =
        multiply_f64({gX, params.x_stride, 1}, {gY + n * params.y_stride, 1, params.y_stride}, rows,
                     pitch - n, params.inner);
    if (row < rows && n + column < pitch) gOut[row * pitch + n + column] = sum;
  }
}

cudaError_t launch_f64(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView& rows = params.matrices.rows;
  const int64_t row_tiles = num_tiles(rows.total, rows.num_seqs, kTileF64);
  const int64_t ctas = row_tiles + num_zero_ctas(params.matrices.capacity);
  return launch<jagged_jagged_bmm_jagged_out_f64_kernel>(
      JaggedJaggedBmmJaggedOutLaunch{params, row_tiles}, {ctas}, kThreadsF64, 0, stream,
      "cuda.jagged_jagged_bmm_jagged_out.fma.f64");
}

// Whether the product runs on wgmma. Three products of TF32, whose operands must be split for it, are
// no faster there.
bool takes_wgmma(const JaggedJaggedBmmJaggedOutParams& params) {
  constexpr int64_t kMaxInner = 1 << 20;
  constexpr int64_t kMaxRows = std::numeric_limits<int>::max() / 2;  // coordinates of copies
  const auto copyable = [&](int64_t rows, int64_t stride, bool vectors) {
    return vectors && rows <= kMaxRows && (rows <= 1 || stride >= params.inner);
  };
  const int64_t vector = is_16_bit(params.type) ? 8 : 4;  // elements of 16 bytes
  return params.type != ElementType::kF32 && !params.mma_sync_only && params.inner % vector == 0 &&
         params.inner > 0 && params.inner <= kMaxInner &&
         copyable(params.matrices.rows.total, params.x_stride, params.x_vectors) &&
         copyable(params.matrices.columns.total, params.y_stride, params.y_vectors) && has_wgmma();
}

}  // namespace
}  // namespace gemm

cudaError_t launch_jagged_jagged_bmm_jagged_out(const JaggedJaggedBmmJaggedOutParams& params,
                                                cudaStream_t stream) {
  if (params.type == ElementType::kF64) return gemm::launch_f64(params, stream);
  if (gemm::takes_wgmma(params)) {
    const cudaError_t error = gemm::launch_wgmma(params, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return gemm::with_math(
      params.type, [&](auto math) { return gemm::launch_math<decltype(math)>(params, stream); });
}

}  // namespace jagged_cuda
