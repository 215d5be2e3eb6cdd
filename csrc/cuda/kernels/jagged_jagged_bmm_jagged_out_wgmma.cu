// jagged_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0): z_b = x_b y_b^T for each
// sequence b, f32 sums. 16-bit elements, and f32 rounded to TF32, which the copies do.
//
// Grid: x, one CTA for each virtual tile of 64 rows of x (prim/jagged.cuh), then some
// that write zeros where there is no matrix (gemm/matrices.cuh); y, parts of the sequence's columns, more than one only where there are few
// rows. A CTA walks its columns in tiles of up to kMaxColumns, all of them where it can, since then
// x and y come from L2 once, and D in steps of 128 bytes. Its four warps are one warpgroup; each owns
// 16 whole rows. Where sequences are long, x counts virtual tiles of fewer rows instead, *shares*, and
// those of a sequence share its tiles evenly: no CTA walks 4,096 columns while others have ended, and
// those that run at once read the same rows. The longest have two warpgroups, and tiles of 128 rows.
//
//     for each tile of columns:
//         start the copies of as many steps as there are slots
//         for each step i of D:
//             wait for the copies of step i, start its product, wait for it, __syncthreads
//             start the copies that follow, into the slot that is free now
//         store the tile from the slots' memory
//
// Tensor cores truncate as they add: every kSumDepth of D the sum is added to a rounded one
// (RoundedSum).
//
// Storing: rows of z_b begin at any element (gemm/ragged_band.cuh).
//
// Shared memory: kRingBytes, which hold slots of x [kTileM, 128 bytes] and y [8 kBlocks, 128 bytes], as
// many as fit, and once these are read a band of 16 rows for each warp.
//
// Barriers: full[slot], on which the bytes of a slot complete; a thread of each warp arrives with
// what it copies. One __syncthreads a step: all have seen the product end whose slot is filled next.
//
// Virtual tiles without rows and rows outside every sequence return at once, as does a sequence
// without columns; of a matrix that does not fit nothing is stored. Copies bring rows by 32, so they
// may reach into the next sequence, which gives elements that are not stored, as do slots that are
// not filled; past D both operands are zeros.
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/matrices_shape.h"
#include "cuda/kernels/gemm/ragged_band.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/narrow_search.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

constexpr int kColumnPart = 64;  // a part has a multiple of as many columns

// kWide: all columns of most sequences in one tile. Chosen by time on an H200
// (docs/performance_log.md).
template <typename Math_, bool kWide_, bool kDeep_ = false, bool kShared_ = false, int kGroups_ = 1>
struct MatricesWgmmaConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr bool kWide = kWide_;
  static constexpr bool kDeep = kDeep_;     // D is more than kRoundedSteps steps
  static constexpr int kGroups = kGroups_;  // warpgroups, of 64 rows each
  static constexpr int kTileM = 64 * kGroups;
  static constexpr bool kShared = kShared_;  // in shares
  static constexpr int kRowBytes = 128;      // of a step of D
  static constexpr int kStepK = kRowBytes / sizeof(Element);
  static constexpr int kProductK = 32 / sizeof(Element);  // of one wgmma
  static constexpr int kProducts = kStepK / kProductK;
  static constexpr int kRoundedSteps = kSumDepth / kStepK;
  static constexpr int kThreads = 128 * kGroups, kWarps = kThreads / 32;
  // Two slots of the widest tile, and as many CTAs per SM as fit beside it; in registers too.
  static constexpr int kMaxColumns = kGroups > 1 ? 192 : kWide ? 224 : 128;
  static constexpr int kMinCtas = kGroups > 1 ? 2 : kWide ? 3 : kDeep ? 3 : 4;
  static constexpr int kRingBytes = (kGroups > 1 ? 112 : kWide ? 72 : 54) * 1024;
  static constexpr int kMaxSlots = 4;
  static_assert(2 * (kTileM + kMaxColumns) * kRowBytes <= kRingBytes);
};

template <typename Config>
struct MatricesWgmmaStorage {
  using Band = RaggedBand<typename Config::Element, Config::kMaxColumns>;
  static_assert(Config::kThreads / 32 * sizeof(Band) <= Config::kRingBytes);

  union {
    alignas(1024) char ring[Config::kRingBytes];
    Band bands[Config::kThreads / 32];
  };
  uint64_t full[Config::kMaxSlots];
};

// Tensor maps of one operand: boxes of 128 bytes and of as many rows.
struct RowBoxes {
  CUtensorMap rows_64, rows_32;
};

struct MatricesWgmmaParams {
  RowBoxes x, y;
  JaggedJaggedBmmJaggedOutParams product;
  int64_t row_tiles;
  int share_log2;  // rows of a share
};

// Rows by 32, as copies bring them.
__device__ __forceinline__ int copied_rows(int rows) { return (rows + 31) / 32 * 32; }

// Starts the copy of 64 or 32 rows of step `k`; one thread alone.
__device__ __forceinline__ void copy_rows(void* shared, const RowBoxes& boxes, int k, int64_t row,
                                          int rows, uint64_t& full) {
  ptx::cp_async_bulk_tensor_3d(shared, rows == 64 ? boxes.rows_64 : boxes.rows_32, k, 0,
                               static_cast<int>(row), full);
}

// Where the operands of a tile of 8 kBlocks columns lie in the ring.
template <typename Config, int kBlocks>
struct Slots {
  using XTile = WarpgroupTile<typename Config::Element, 64, Config::kStepK>;
  using YTile = WarpgroupTile<typename Config::Element, 8 * kBlocks, Config::kStepK>;
  static constexpr int kXBytes = Config::kGroups * sizeof(XTile);
  static constexpr int kSlotBytes = kXBytes + sizeof(YTile);
  static constexpr int kFitting = Config::kRingBytes / kSlotBytes;
  static constexpr int kCount = kFitting < Config::kMaxSlots ? kFitting : Config::kMaxSlots;
  static_assert(kCount >= 2);

  char* ring;
  uint64_t* full;
  uint32_t parities;  // bit i: of the phase of full[i] that comes next

  __device__ __forceinline__ XTile& x(int slot, int group) const {
    return reinterpret_cast<XTile*>(ring + slot * kSlotBytes)[group];
  }
  __device__ __forceinline__ YTile& y(int slot) const {
    return *reinterpret_cast<YTile*>(ring + slot * kSlotBytes + kXBytes);
  }
  __device__ __forceinline__ void wait(int slot) {
    ptx::mbarrier_wait(full[slot], parities >> slot & 1);
    parities ^= 1u << slot;
  }
  __device__ __forceinline__ static int next(int slot) { return slot + 1 == kCount ? 0 : slot + 1; }
};

// sum = x y^T over `steps` steps, of which as many as there are slots have been started;
// start_copies(step, slot) starts another. Nobody reads the slots afterwards.
template <typename Config, int kBlocks, typename StartCopies>
__device__ __forceinline__ void multiply(float (&sum)[kBlocks][4], Slots<Config, kBlocks>& slots,
                                         int steps, StartCopies start_copies) {
  using XTile = typename Slots<Config, kBlocks>::XTile;
  using YTile = typename Slots<Config, kBlocks>::YTile;
  RoundedSum<kBlocks> rounded;
  const int group = Config::kGroups == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
#pragma unroll 1
  for (int step = 0, slot = 0; step < steps; ++step) {
    if (Config::kDeep && step > 0 && step % Config::kRoundedSteps == 0) rounded.add(sum);
    slots.wait(slot);
    ptx::wgmma_fence();
    const ptx::MatrixDescriptor x = slots.x(slot, group).descriptor().uniform(),
                                y = slots.y(slot).descriptor().uniform();
#pragma unroll
    for (int p = 0; p < Config::kProducts; ++p) {
      const int k = p * Config::kProductK;
      ptx::WideWgmma<typename Config::Element>::run(sum, x + XTile::column_step_bytes(k),
                                                    y + YTile::column_step_bytes(k));
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    __syncthreads();  // nobody reads the slot any more
    if (threadIdx.x % 32 == 0) start_copies(step + Slots<Config, kBlocks>::kCount, slot);
    slot = slots.next(slot);
  }
  if (Config::kDeep) rounded.finish(sum);
}

template <typename Config>
__global__
__launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_jagged_bmm_jagged_out_wgmma(
    const __grid_constant__ MatricesWgmmaParams launch) {
  using Element = typename Config::Element;
  using Storage = MatricesWgmmaStorage<Config>;
  constexpr int kTileM = Config::kTileM, kStepK = Config::kStepK;
  extern __shared__ __align__(1024) char matrices_wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<Storage*>(matrices_wgmma_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  start_overlapping();
  Element* gOut = static_cast<Element*>(params.out);
  if (blockIdx.x >= launch.row_tiles) {
    const int64_t part = blockIdx.x - launch.row_tiles, parts = gridDim.x - launch.row_tiles;
    if (blockIdx.y == 0) zero_outside<Config::kThreads>(params.matrices, gOut, part, parts);
    return;
  }

  if (threadIdx.x == 0) {
    for (const RowBoxes* boxes : {&launch.x, &launch.y}) {
      ptx::prefetch_tensormap(boxes->rows_64);
      ptx::prefetch_tensormap(boxes->rows_32);
    }
    for (int slot = 0; slot < Config::kMaxSlots; ++slot) {
      ptx::mbarrier_init(shared.full[slot], Config::kThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }
  const JaggedTile tile =
      Config::kShared ? find_tile_narrow(params.matrices.rows, blockIdx.x, launch.share_log2)
                      : find_tile_narrow<kTileM>(params.matrices.rows, blockIdx.x);
  if (tile.seq < 0 || tile.row >= tile.rows.len) return;
  // Copies do not wait for what only storing needs: of a matrix that does not fit nothing is stored.
  const Matrix matrix = find_matrix(params.matrices, tile.seq);
  const bool is_square = params.matrices.columns.data == params.matrices.rows.data &&
                         params.matrices.columns.total == params.matrices.rows.total;
  const RowRange all_columns = is_square ? tile.rows : matrix.columns;
  const int64_t pitch = all_columns.len;
  constexpr int kPart = kColumnPart;
  const int64_t each = gridDim.y == 1 ? pitch : (pitch / kPart + gridDim.y) / gridDim.y * kPart;
  if (blockIdx.y * each >= pitch) return;
  const int begin = static_cast<int>(blockIdx.y * each);
  const int end = static_cast<int>(min(begin + each, pitch));
  const int inner = static_cast<int>(params.inner), steps = (inner + kStepK - 1) / kStepK;
  const int warp = threadIdx.x / 32;
  uint32_t parities = 0;
  __syncthreads();  // the barriers are initialised

  // The columns of a tile, whose first row is `row`, from n on, of which 8 kBlocks are computed.
  const auto multiply_columns = [&](auto num_blocks, int64_t row, int n, int columns) {
    constexpr int kBlocks = decltype(num_blocks)::value;
    Slots<Config, kBlocks> slots{shared.ring, shared.full, parities};
    const int rows = static_cast<int>(min(tile.rows.len - row, int64_t{kTileM}));
    constexpr int kWarps = Config::kWarps, kGroups = Config::kGroups;
    const int group = kGroups == 1 ? 0 : warp;  // whose rows of x this warp copies
    const int x_rows = copied_rows(kGroups == 1 ? rows : min(max(rows - 64 * group, 0), 64)),
              y_rows = copied_rows(columns);
    // To start a copy takes a thread some hundred cycles: one of each warp starts one, of 64 rows of
    // x or of y, the first warp two where y has more than three times as many as one warpgroup.
    const int x_part = (kGroups == 1 ? warp == 0 : warp < kGroups) ? x_rows : 0,
              y_part = (warp + kWarps - kGroups) % kWarps * 64,
              y_part_rows = min(max(y_rows - y_part, 0), 64);
    const auto start_copies = [&](int step, int slot) {
      if (step >= steps) return;
      uint64_t& full = shared.full[slot];
      const int k = step * kStepK;
      ptx::mbarrier_arrive_expect_tx(full, (x_part + y_part_rows) * Config::kRowBytes);
      if (x_part > 0) {
        copy_rows(slots.x(slot, group).data, launch.x, k, tile.rows.begin + row + 64 * group,
                  x_part, full);
      }
      if (y_part_rows > 0) {
        copy_rows(slots.y(slot).data + y_part * kStepK, launch.y, k, all_columns.begin + n + y_part,
                  y_part_rows, full);
      }
    };
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < slots.kCount; ++slot) start_copies(slot, slot);
    }
    float sum[kBlocks][4] = {};
    multiply(sum, slots, steps, start_copies);
    parities = slots.parities;
    if (matrix.fits) {
      Element* gRows = gOut + matrix.begin + (row + 16 * warp) * pitch;
      shared.bands[warp].store(sum, gRows + n, pitch, rows - 16 * warp, columns);
    }
    shared.bands[warp].end_store();
  };
  // Tiles alike, of a multiple of 32 columns.
  const int tiles = (end - begin + Config::kMaxColumns - 1) / Config::kMaxColumns;
  const int width = copied_rows((end - begin + tiles - 1) / tiles);
  const auto multiply_tile = [&](int64_t row, int n, bool follows_another) {
    const int columns = min(end - n, width);
    if (follows_another) {
      ptx::fence_proxy_async();
      __syncthreads();  // the bands have been read, and written before copies replace them
    }
    if (width <= 64) {
      multiply_columns(std::integral_constant<int, 8>{}, row, n, columns);
    } else if (width <= 128) {
      multiply_columns(std::integral_constant<int, 16>{}, row, n, columns);
    } else if constexpr (Config::kMaxColumns > 128) {
      if (width <= 192) {
        multiply_columns(std::integral_constant<int, 24>{}, row, n, columns);
      } else if constexpr (Config::kMaxColumns > 192) {
        multiply_columns(std::integral_constant<int, Config::kMaxColumns / 8>{}, row, n, columns);
      }
    }
  };
  if constexpr (!Config::kShared) {
    for (int n = begin; n < end; n += width) multiply_tile(tile.row, n, n > begin);
  } else {
    // Tiles of the whole sequence, those of the same kTileM rows after each other.
    const int64_t all = (tile.rows.len + kTileM - 1) / kTileM * tiles,
                  shares = ((tile.rows.len - 1) >> launch.share_log2) + 1,
                  share = tile.row >> launch.share_log2, first = share * all / shares;
    const int64_t count = (share + 1) * all / shares - first;
    int64_t row = first / tiles * kTileM;
    int n = static_cast<int>(first % tiles) * width;
    for (int64_t i = 0; i < count; ++i) {
      multiply_tile(row, n, i > 0);
      n += width;
      if (n >= end) n = 0, row += kTileM;
    }
  }
}

template <typename Math>
constexpr PathName kPath = PathName("cuda.jagged_jagged_bmm_jagged_out.wgmma.") + Math::kName;

// share_log2: of the rows of a share, where the tiles are in shares.
template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream,
                          int share_log2 = 0) {
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  const auto encode = [&](RowBoxes& boxes, const void* data, int64_t count, int64_t stride) {
    // A tensor without rows is never copied from, but its map must be valid.
    const TensorMapSource source{
        count > 0 ? data : params.out, params.type, count, 1, params.inner, stride, 0};
    const cudaError_t error = encode_tensor_map(boxes.rows_64, source, 64, Config::kStepK);
    if (error != cudaSuccess) return error;
    return encode_tensor_map(boxes.rows_32, source, 32, Config::kStepK);
  };
  MatricesWgmmaParams launch_params;
  launch_params.product = params;
  launch_params.share_log2 = share_log2;
  launch_params.row_tiles =
      num_tiles(rows.total, rows.num_seqs, Config::kShared ? 1 << share_log2 : Config::kTileM);
  cudaError_t error = encode(launch_params.x, params.x, rows.total, params.x_stride);
  if (error == cudaSuccess) {
    error = encode(launch_params.y, params.y, columns.total, params.y_stride);
  }
  if (error != cudaSuccess) return error;
  const int64_t parts =
      Config::kShared ? 1
                      : split_columns(columns.total, kColumnPart, launch_params.row_tiles).parts;
  const int64_t ctas = launch_params.row_tiles + num_zero_ctas(params.matrices.capacity);
  return launch_overlapping<jagged_jagged_bmm_jagged_out_wgmma<Config>>(
      params.overlaps, launch_params, {ctas, parts}, Config::kThreads,
      sizeof(MatricesWgmmaStorage<Config>), stream, kPath<typename Config::Math>);
}

template <typename Math>
cudaError_t launch_math(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  using Deep = MatricesWgmmaConfig<Math, false, true>;
  if (params.inner > Deep::kRoundedSteps * Deep::kStepK) {
    return launch_config<Deep>(params, stream);
  }
  // Which tile is a matter of time alone: the sums are the same.
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  constexpr int64_t kFewColumns = 48;  // on average: short sequences gain from more CTAs
  constexpr int64_t kFewTiles = 1024, kFewestTiles = 192;
  const int64_t row_tiles = num_tiles(rows.total, rows.num_seqs, Deep::kTileM);
  const bool is_few = row_tiles < kFewTiles;
  // Long sequences are shared where this was faster on an H100 (docs/performance_log.md). A few rows
  // with many columns are not: their columns are the grid's y.
  constexpr int kRows16 = 4, kRows32 = 5;                // log2 of a share's
  constexpr int64_t kLong = 300, kLongest = 1024;        // columns
  constexpr int64_t kEnough = 1 << 21, kMany = 1 << 23;  // elements
  const MatricesShape shape(params.matrices.capacity, rows);
  if (shape.row >= kLong && params.matrices.capacity >= kEnough &&
      columns.total <= 2 * rows.total) {
    const int64_t row_bytes = params.inner * static_cast<int64_t>(sizeof(typename Math::Element));
    const bool is_longest = shape.row >= kLongest && params.matrices.capacity >= kMany;
    if (is_longest && params.inner >= 256) {
      return launch_config<MatricesWgmmaConfig<Math, true, false, true, 2>>(params, stream,
                                                                            kRows16);
    }
    if ((shape.is_skewed() && row_tiles < 2 * kFewTiles) ||
        (row_bytes >= 1024 && row_tiles >= kFewestTiles) ||
        (is_longest && (is_few || row_bytes >= 256))) {
      return launch_config<MatricesWgmmaConfig<Math, true, false, true>>(params, stream, kRows16);
    }
    if (row_bytes >= 512 && !is_few) {
      return launch_config<MatricesWgmmaConfig<Math, true, false, true>>(params, stream, kRows32);
    }
  }
  const bool is_wide = columns.total > kFewColumns * columns.num_seqs && !is_few;
  return is_wide ? launch_config<MatricesWgmmaConfig<Math, true>>(params, stream)
                 : launch_config<MatricesWgmmaConfig<Math, false>>(params, stream);
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
