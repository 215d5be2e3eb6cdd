// jagged_jagged_bmm_jagged_out of f32 in full precision on wgmma and TMA (compute capability 9.0):
// z_b = x_b y_b^T for each sequence b as three products of TF32, f32 sums.
//
// Each operand is a big part, which is TF32, and a small one, the rest: x y^T = big big^T + (big
// small^T + small big^T). The products with small parts have a sum of their own: an infinite
// operand makes it NaN, so it counts only where the first sum is finite. Tensor cores truncate as
// they add: every kDepth of D the first sum is added to a rounded one (LongSum).
//
// Grid: as in jagged_jagged_bmm_jagged_out_wgmma.cu. x, one CTA for each virtual tile of 64 rows of
// x (prim/jagged.cuh), then one for each kZeroElems elements of the result, which writes zeros
// where there is no matrix (gemm/matrices.cuh); y, parts of the sequence's columns, more than one
// only where there are few rows. A CTA walks its columns in tiles of up to kMaxColumns, and D in
// steps of 32. Each of two warpgroups has half of a tile's columns; each of its warps owns 16 rows
// of these. x is split in registers, y in shared memory, while the product of the step before runs:
//
//     for each tile of columns:
//         start the copies of as many steps as there are slots
//         for each step i of D:
//             wait for the copies of step i; split y_i in place, small parts go to sSmall[i % 2]
//             wait for the product of step i - 1; load and split x_i
//             __syncthreads, start the product of step i (of half of x_i, then of the other)
//             start the copies of step i - 1 + kSlots
//         store the tile from the slots' memory (gemm/ragged_band.cuh)
//
// Shared memory: Ring, kSlots slots of x [64, 32] and y [kMaxColumns, 32] and twice the small parts
// of y, and once these are read a band of 16 rows for each warp. Two CTAs per SM.
//
// Barriers: full[slot], on which the bytes of a slot complete; three threads arrive with what they
// copy. One __syncthreads a step: y_i is split, and all have seen the product before end, whose
// slot is filled and whose small parts are written next.
//
// Virtual tiles without rows, rows outside every sequence, a sequence without columns and a matrix
// that does not fit return at once. Copies bring rows by 32, so they may reach into the next
// sequence, which gives elements that are not stored, as do rows of slots that are not filled; past
// D both operands are zeros.
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/engine.cuh"
#include "cuda/kernels/gemm/long_sum.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/ragged_band.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

constexpr int kThreads = 256, kMinCtas = 2;
constexpr int kTileM = 64;
constexpr int kMaxColumns = 128, kColumnPart = 64;  // a part has a multiple of as many columns
constexpr int kRowBytes = 128, kStepK = kRowBytes / sizeof(float), kProductK = 8;
constexpr int kParts = 2;  // of a step: x of one is in registers at once
constexpr int kDepth = 64;
constexpr int kSlots = 3;

template <int kColumns>
struct Ring {
  using YTile = WarpgroupTile<float, kColumns, kStepK>;

  WarpgroupTile<float, kTileM, kStepK> sX[kSlots];
  YTile sY[kSlots];
  YTile sSmall[2];  // small parts
};

struct Storage {
  using Band = RaggedBand<float, kMaxColumns / 2>;

  union {
    Ring<kMaxColumns> ring;
    Band bands[kThreads / 32];
  };
  uint64_t full[kSlots];
  // What storing needs and the products do not: kept out of registers.
  struct {
    float* rows;  // [num_rows, pitch]
    int pitch, num_rows, x_row, y_row;
  } target;
};

// Tensor maps of one operand: boxes of 128 bytes and of as many rows.
struct RowBoxes {
  CUtensorMap rows_64, rows_32;
};

struct MatricesF32Params {
  RowBoxes x, y;
  JaggedJaggedBmmJaggedOutParams product;
  int64_t row_tiles;
};

// Rows by 32, as copies bring them.
__device__ __forceinline__ int copied_rows(int rows) { return (rows + 31) / 32 * 32; }

// A thread's part of the first `rows` rows of a tile, in place: big parts stay, small ones go to `small`.
template <typename Tile>
__device__ __forceinline__ void split(Tile& tile, Tile& small, int rows) {
  constexpr int kRows = kThreads * 16 / kRowBytes, kChunks = Tile::kRows / kRows;
  const uint32_t from = ptx::shared_address(tile.data) + threadIdx.x * 16,
                 to = ptx::shared_address(small.data) + threadIdx.x * 16;
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int first = 0; first < kChunks; first += kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      values[i] = {};
      if ((first + i) * kRows < rows)
        values[i] = ptx::ld_shared_16(from + (first + i) * kThreads * 16);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t bits[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      float big[4], rest[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rest[e] = __uint_as_float(split_tf32<true>(bits[e]));
        big[e] = __uint_as_float(bits[e]);
      }
      if ((first + i) * kRows < rows) {
        ptx::st_shared_16(from + (first + i) * kThreads * 16, big);
        ptx::st_shared_16(to + (first + i) * kThreads * 16, rest);
      }
    }
  }
}

__global__ __launch_bounds__(kThreads, kMinCtas) void jagged_jagged_bmm_jagged_out_f32_wgmma(
    const __grid_constant__ MatricesF32Params launch) {
  extern __shared__ __align__(1024) char matrices_f32_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(matrices_f32_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  float* gOut = static_cast<float*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    const int64_t part = blockIdx.x - launch.row_tiles;
    if (blockIdx.y == 0) zero_outside<kThreads>(params.matrices, gOut, part);
    return;
  }

  if (threadIdx.x == 0) {
    for (const RowBoxes* boxes : {&launch.x, &launch.y}) {
      ptx::prefetch_tensormap(boxes->rows_64);
      ptx::prefetch_tensormap(boxes->rows_32);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], 3);
    }
    ptx::fence_mbarrier_init();
  }
  const JaggedTile tile = find_tile_narrow<kTileM>(params.matrices.rows, blockIdx.x);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  const Matrix matrix = find_matrix(params.matrices, tile.seq);
  const int64_t pitch = matrix.columns.len;
  constexpr int kPart = kColumnPart;
  const int64_t each = gridDim.y == 1 ? pitch : (pitch / kPart + gridDim.y) / gridDim.y * kPart;
  if (!matrix.fits || blockIdx.y * each >= pitch) return;
  const int begin = static_cast<int>(blockIdx.y * each);
  const int end = static_cast<int>(min(begin + each, pitch));
  const int rows = static_cast<int>(min(tile.rows.len - tile.row, int64_t{kTileM}));
  const int steps = (static_cast<int>(params.inner) + kStepK - 1) / kStepK;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
  int first_index = 0;  // of the steps of all tiles
  if (threadIdx.x == 0) {
    shared.target = {gOut + matrix.begin + tile.row * pitch, static_cast<int>(pitch), rows,
                     static_cast<int>(tile.rows.begin + tile.row),
                     static_cast<int>(matrix.columns.begin)};
  }
  __syncthreads();  // the barriers are initialised, the target is known

  // The columns of a tile from n on, of which 16 kBlocks are computed, half by each warpgroup.
  const auto multiply_columns = [&](auto num_blocks, int n, int columns) {
    constexpr int kBlocks = decltype(num_blocks)::value, kHalf = 8 * kBlocks;
    auto& ring = reinterpret_cast<Ring<2 * kHalf>&>(shared.ring);
    const int y_rows = copied_rows(columns);
    // The first warp starts the copies of x, two others those of 64 rows of y each.
    const auto start_copies = [&](int step) {
      if (step >= steps) return;
      const int slot = (first_index + step) % kSlots, part = (warp - 1) * 64;
      uint64_t& full = shared.full[slot];
      const bool is_x = warp == 0;
      const int part_rows =
          is_x ? copied_rows(shared.target.num_rows) : min(max(y_rows - part, 0), 64);
      ptx::mbarrier_arrive_expect_tx(full, part_rows * kRowBytes);
      if (part_rows == 0) return;
      const RowBoxes& boxes = is_x ? launch.x : launch.y;
      ptx::cp_async_bulk_tensor_3d(is_x ? ring.sX[slot].data : ring.sY[slot].data + part * kStepK,
                                   part_rows == 64 ? boxes.rows_64 : boxes.rows_32, step * kStepK,
                                   0, is_x ? shared.target.x_row : shared.target.y_row + n + part,
                                   full);
    };
    const bool copies = lane == 0 && warp < 3;
    if (copies) {
      for (int step = 0; step < kSlots; ++step) start_copies(step);
    }
    // Register i of x [16, 8] has row lane / 4 + 8 (i % 2) and column lane % 4 + 4 (i / 2).
    const uint32_t x_place =
        (warp % 4 * 16 + lane / 4) * kRowBytes + lane / 4 * 16 + lane % 4 * sizeof(float);

    float sum[kBlocks][4] = {}, small_sum[kBlocks][4] = {};
    LongSum<kBlocks> long_sum;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int index = first_index + step, slot = index % kSlots;
      ptx::mbarrier_wait(shared.full[slot], index / kSlots % 2);
      split(ring.sY[slot], ring.sSmall[step % 2], y_rows);
      const uint32_t x = ptx::shared_address(ring.sX[slot].data) + x_place;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(sum);
        ptx::fence_operands(small_sum);
        if (part == 0 && step > 0 && step % (kDepth / kStepK) == 0) long_sum.add(sum);
        constexpr int kProducts = kStepK / kProductK / kParts;
        uint32_t big[kProducts][4], small[kProducts][4];
#pragma unroll
        for (int i = 0; i < kProducts * 4; ++i) {
          const int chunk = (part * kProducts + i / 4) * 2 + i % 4 / 2;
          big[i / 4][i % 4] = ptx::ld_shared_4((x ^ chunk * 16) + i % 2 * 8 * kRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kProducts * 4; ++i) {
          // Both parts are computed here, and not between the products.
          uint32_t& value = big[i / 4][i % 4];
          small[i / 4][i % 4] = ptx::opaque(static_cast<int>(split_tf32<true>(value)));
          value = ptx::opaque(static_cast<int>(value));
        }
        if (part == 0) {
          ptx::fence_proxy_async();
          __syncthreads();  // y is split; all have seen the product before end
        }
        using Product = ptx::WideWgmma<float>;
        const ptx::MatrixDescriptor y = ring.sY[slot].descriptor(group * kHalf),
                                    small_y = ring.sSmall[step % 2].descriptor(group * kHalf);
        ptx::wgmma_fence();
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          const int bytes = (part * kProducts + p) * kProductK * static_cast<int>(sizeof(float));
          Product::run(sum, big[p], y + bytes);
        }
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
          const int bytes = (part * kProducts + p) * kProductK * static_cast<int>(sizeof(float));
          Product::run(small_sum, big[p], small_y + bytes);
          Product::run(small_sum, small[p], y + bytes);
        }
        ptx::wgmma_commit_group();
      }
      if (copies && step > 0) start_copies(step - 1 + kSlots);
    }
    first_index += steps;
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    ptx::fence_operands(small_sum);
    long_sum.finish(sum);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const float whole = sum[i / 4][i % 4];
      sum[i / 4][i % 4] = isfinite(whole) ? whole + small_sum[i / 4][i % 4] : whole;
    }
    __syncthreads();  // all products have been done
    const int line = shared.target.pitch, own_columns = min(columns - group * kHalf, kHalf);
    if (own_columns > 0) {
      shared.bands[warp].store(
          sum, shared.target.rows + int64_t{16} * (warp % 4) * line + n + group * kHalf, line,
          shared.target.num_rows - 16 * (warp % 4), own_columns);
    }
    shared.bands[warp].end_store();
  };
  // Tiles alike, of a multiple of 32 columns.
  const int tiles = (end - begin + kMaxColumns - 1) / kMaxColumns;
  const int width = copied_rows((end - begin + tiles - 1) / tiles);
  for (int n = begin; n < end; n += width) {
    const int columns = min(end - n, width);
    if (n > begin) {
      ptx::fence_proxy_async();
      __syncthreads();  // the bands have been read, and written before copies replace them
    }
    if (width <= 64) {
      multiply_columns(std::integral_constant<int, 4>{}, n, columns);
    } else {
      multiply_columns(std::integral_constant<int, 8>{}, n, columns);
    }
  }
}

constexpr PathName kPath = PathName("cuda.jagged_jagged_bmm_jagged_out.wgmma.f32");

}  // namespace

cudaError_t launch_f32_wgmma(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  const auto encode = [&](RowBoxes& boxes, const void* data, int64_t count, int64_t stride) {
    // A tensor without rows is never copied from, but its map must be valid.
    const TensorMapSource source{
        count > 0 ? data : params.out, params.type, count, 1, params.inner, stride, 0};
    const cudaError_t error = encode_tensor_map(boxes.rows_64, source, 64, kStepK);
    if (error != cudaSuccess) return error;
    return encode_tensor_map(boxes.rows_32, source, 32, kStepK);
  };
  MatricesF32Params launch_params;
  launch_params.product = params;
  launch_params.row_tiles = num_tiles(rows.total, rows.num_seqs, kTileM);
  cudaError_t error = encode(launch_params.x, params.x, rows.total, params.x_stride);
  if (error == cudaSuccess) {
    error = encode(launch_params.y, params.y, columns.total, params.y_stride);
  }
  if (error != cudaSuccess) return error;
  const ColumnSplit split = split_columns(columns.total, kColumnPart, launch_params.row_tiles);
  const int64_t ctas = launch_params.row_tiles + num_zero_ctas(params.matrices.capacity);
  return launch<jagged_jagged_bmm_jagged_out_f32_wgmma>(launch_params, {ctas, split.parts},
                                                        kThreads, sizeof(Storage), stream, kPath);
}

}  // namespace jagged_cuda::gemm
