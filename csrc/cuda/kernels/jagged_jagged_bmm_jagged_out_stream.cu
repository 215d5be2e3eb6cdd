// jagged_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0): z_b = x_b y_b^T for each
// sequence b, f32 sums. 16-bit elements, and f32 rounded to TF32, which the copies do.
//
// Grid: one CTA per SM, each with a share of all tiles (gemm/matrix_tiles.cuh), [kTileM, kTileN] of a
// matrix, which it computes one after another. Copies run ahead of the products, from tile to tile:
// what arrives while a tile is stored waits in the ring.
//
//     producer (one warp)                 each of two warpgroups, 64 rows of the tile
//     for each tile:                      for each tile:
//       publish it                          for each step i of D:
//       for each step i of D:                 start the product of step i
//         copy x, y into a free stage         wait for the one before, free its stage
//                                           wait for the last, store the tile
//
// A step is 128 bytes of D. Tensor cores truncate as they add: every kSumDepth of D the sum is added
// to a rounded one (RoundedSum). Rows of z_b begin at any element (gemm/ragged_rows.cuh).
//
// Shared memory: kStages stages of x [kTileM, 128 bytes] and y [kTileN, 128 bytes]; 8 lines for each
// warp.
//
// Barriers:           arrives                              waits
//     items.full      producer                             computing warps
//     items.empty     computing warps                      producer
//     ring.full       producer, with the bytes of a stage  computing warps
//     ring.empty      computing warps, after the product   producer
//
// Rows outside every sequence have no tile, nor have matrices that do not fit. Copies are of kBox
// rows, as many as have one that exists: they may reach into the next sequence, and what lies behind
// them is old, which gives elements that are not stored; past D both operands are zeros. While the
// first copies are under way, zeros are written where there is no matrix (gemm/matrices.cuh).
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/matrix_tiles.cuh"
#include "cuda/kernels/gemm/ragged_rows.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ring.cuh"
#include "cuda/kernels/prim/tma.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Math_, int kTileN_, int kStages_, int kBox_>
struct MatricesWgmmaConfig {
  using Math = Math_;
  using Element = typename Math::Element;
  static constexpr int kTileM = 128, kTileN = kTileN_;
  static constexpr int kComputingWarps = 8;
  static constexpr int kThreads = 384;  // and a warpgroup of which one warp produces
  // Together all that kThreads have at the start.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kStepK = 128 / sizeof(Element);
  static constexpr int kProductK = 32 / sizeof(Element);  // of one wgmma
  static constexpr int kBox = kBox_;                      // rows of a copy
  static constexpr int kStages = kStages_;
  static constexpr int kItems = 4;
  using Tiles = MatrixTiles<kTileM, 64, kTileN>;
};

template <typename Config>
struct MatricesWgmmaStorage {
  using XTile = WarpgroupTile<typename Config::Element, Config::kTileM, Config::kStepK>;
  using YTile = WarpgroupTile<typename Config::Element, Config::kTileN, Config::kStepK>;
  struct Stage {
    XTile sX;
    YTile sY;
  };
  Stage stages[Config::kStages];
  RaggedRows<typename Config::Element> lines[Config::kComputingWarps];
  Ring<Config::kStages> ring;
  Ring<Config::kItems> items;
  MatrixTile item[Config::kItems];
};

struct MatricesWgmmaParams {
  CUtensorMap x, y;  // boxes of kBox rows and 128 bytes
  JaggedJaggedBmmJaggedOutParams product;
};

// Publishes the tiles and copies their operands; one warp.
template <typename Config>
__device__ __forceinline__ void produce(const MatricesWgmmaParams& launch,
                                        MatricesWgmmaStorage<Config>& shared) {
  constexpr int kBox = Config::kBox, kStepK = Config::kStepK;
  RingPosition<Config::kItems> place;
  RingPosition<Config::kStages> position;
  const bool leads = threadIdx.x % 32 == 0;
  const int inner = static_cast<int>(launch.product.inner);
  const auto publish = [&](const MatrixTile& tile) {
    shared.items.acquire(place);
    shared.item[place.stage] = tile;
    ptx::mbarrier_arrive(shared.items.full[place.stage]);
    place.advance();
  };
  Config::Tiles::walk(
      launch.product.matrices, blockIdx.x, gridDim.x, [&](const MatrixTile& tile) {
        if (leads) {
          publish(tile);
          const int x_boxes = (tile.rows + kBox - 1) / kBox,
                    y_boxes = (tile.columns + kBox - 1) / kBox;
          for (int k = 0; k < inner; k += kStepK) {
            shared.ring.acquire(position);
            auto& stage = shared.stages[position.stage];
            uint64_t& full = shared.ring.full[position.stage];
            ptx::mbarrier_arrive_expect_tx(full, (x_boxes + y_boxes) * kBox * 128);
            for (int box = 0; box < x_boxes; ++box) {
              ptx::cp_async_bulk_tensor_3d(stage.sX.data + box * kBox * kStepK, launch.x, k, 0,
                                           tile.x_row + box * kBox, full);
            }
            for (int box = 0; box < y_boxes; ++box) {
              ptx::cp_async_bulk_tensor_3d(stage.sY.data + box * kBox * kStepK, launch.y, k, 0,
                                           tile.y_row + box * kBox, full);
            }
            position.advance();
          }
        }
        __syncwarp();
      });
  if (leads) {
    MatrixTile end = {};
    end.is_end = true;
    publish(end);
  }
}

// A warpgroup that computes 64 rows of each tile.
template <typename Config>
struct MatricesConsumer {
  using Element = typename Config::Element;
  using Storage = MatricesWgmmaStorage<Config>;

  Storage& shared;
  const int inner;
  Element* const gOut;
  RingPosition<Config::kStages> position;

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 == 0) shared.ring.release(stage);
  }

  __device__ __forceinline__ void compute(const MatrixTile& tile) {
    using Product = ptx::Wgmma<Element, false>;
    constexpr int kBlocks = Config::kTileN / 8;
    const int warp = threadIdx.x / 32, row = warp / 4 * 64;
    const bool at_work = row < tile.rows;
    float sum[kBlocks][4];
    RoundedSum<kBlocks> rounded;
    int last = -1;  // the stage of the product in flight
    for (int k = 0; k < inner; k += Config::kStepK) {
      const int depth = k % kSumDepth;  // that the sum has
      if (k > 0 && depth == 0) {
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(sum);
        rounded.add(sum);
      }
      shared.ring.wait(position);
      auto& stage = shared.stages[position.stage];
      if (at_work) {
        ptx::wgmma_fence();
        const ptx::MatrixDescriptor x_rows = stage.sX.descriptor(row),
                                    y_rows = stage.sY.descriptor();
#pragma unroll
        for (int step = 0; step < Config::kStepK; step += Config::kProductK) {
          Product::run(sum, x_rows + Storage::XTile::column_step_bytes(step),
                       y_rows + Storage::YTile::column_step_bytes(step), depth > 0 || step > 0);
        }
        ptx::wgmma_commit_group();
      }
      ptx::wgmma_wait_group<1>();
      if (last >= 0) release(last);
      last = position.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    release(last);
    rounded.finish(sum);
    shared.lines[warp].store(sum, gOut + tile.first + int64_t{16 * warp} * tile.pitch, tile.pitch,
                             tile.rows - 16 * warp, tile.columns);
  }

  __device__ __forceinline__ void run() {
    RingPosition<Config::kItems> place;
    for (;;) {
      shared.items.wait(place);
      const MatrixTile tile = shared.item[place.stage];
      __syncwarp();
      const int stage = place.advance();
      if (threadIdx.x % 32 == 0) shared.items.release(stage);
      if (tile.is_end) return;
      compute(tile);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void jagged_jagged_bmm_jagged_out_wgmma(
    const __grid_constant__ MatricesWgmmaParams launch) {
  using Element = typename Config::Element;
  extern __shared__ __align__(1024) char matrices_wgmma_shared_bytes[];
  auto& shared = *reinterpret_cast<MatricesWgmmaStorage<Config>*>(matrices_wgmma_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.x);
    ptx::prefetch_tensormap(launch.y);
    shared.ring.init(Config::kComputingWarps);
    shared.items.init(Config::kComputingWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised
  // The same in all lanes, as the compiler then sees.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Config::kComputingWarps) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp == Config::kComputingWarps) produce<Config>(launch, shared);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Element* gOut = static_cast<Element*>(params.out);
    const MatricesExtent extent = matrices_extent(params.matrices);
    zero_outside<Config::kComputingWarps * 32>(extent, params.matrices.capacity, gOut);
    MatricesConsumer<Config> consumer{shared, static_cast<int>(params.inner), gOut, {}};
    consumer.run();
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
  cudaError_t error = encode(launch_params.x, params.x, rows.total, params.x_stride);
  if (error == cudaSuccess) {
    error = encode(launch_params.y, params.y, columns.total, params.y_stride);
  }
  int device = 0, num_sms = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  return launch<jagged_jagged_bmm_jagged_out_wgmma<Config>>(
      launch_params, {num_sms}, Config::kThreads, sizeof(MatricesWgmmaStorage<Config>), stream,
      kPath<typename Config::Math>);
}

}  // namespace

cudaError_t launch_stream(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  switch (params.type) {
    case ElementType::kBf16:
      return launch_config<MatricesWgmmaConfig<Bf16, 256, 4, 32>>(params, stream);
    case ElementType::kF16:
      return launch_config<MatricesWgmmaConfig<F16, 256, 4, 32>>(params, stream);
    case ElementType::kTf32:
      return launch_config<MatricesWgmmaConfig<Tf32, 256, 4, 32>>(params, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace jagged_cuda::gemm
