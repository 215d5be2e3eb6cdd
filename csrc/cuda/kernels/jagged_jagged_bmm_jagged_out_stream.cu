// jagged_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0) by a persistent grid: z_b =
// x_b y_b^T for each sequence b, 16-bit elements, f32 sums.
//
// Grid: one CTA per SM, each with a share of all tiles (gemm/matrix_tiles.cuh), [kTileM, kTileN] of a
// matrix, which it computes one after another. Copies run ahead of the products, from tile to tile:
// what arrives while a tile is stored waits in the ring.
//
//     producers (four warps)              each of two warpgroups, 64 rows of the tile
//     for each tile:                      for each tile:
//       publish it                          for each step i of D:
//       for each step i of D:                 start the product of step i
//         copy x, y into a free stage         wait for the one before, free its stage
//                                           wait for the last, store the tile
//
// A step is 128 bytes of D. To start a copy takes a thread some 300 cycles, so that one thread cannot
// start all boxes of a step as fast as they are multiplied: each producer starts its share.
//
// Storing: rows of z_b begin at any element (gemm/ragged_band.cuh).
//
// Shared memory: kStages stages of x [kTileM, 128 bytes] and y [kTileN, 128 bytes]; a band of 16 rows
// for each computing warp.
//
// Barriers:           arrives                                waits
//     items.full      the first producer                     computing warps
//     items.empty     computing warps                        the first producer
//     ring.full       producers, with their bytes            computing warps
//     ring.empty      computing warps, after the product     producers
//
// Rows outside every sequence have no tile, nor have matrices that do not fit. Copies bring rows by 32:
// they may reach into the next sequence, and what lies behind them is old, which gives elements that
// are not stored; past D both operands are zeros. While the first copies are under way, zeros are
// written where there is no matrix (gemm/matrices.cuh).
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/matrix_tiles.cuh"
#include "cuda/kernels/gemm/ragged_band.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ring.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Element_, int kTileN_, int kStages_>
struct MatricesStreamConfig {
  using Element = Element_;
  static constexpr int kTileM = 128, kTileN = kTileN_;
  static constexpr int kComputingWarps = 8, kProducers = 4;
  static constexpr int kThreads = 32 * (kComputingWarps + kProducers);
  // Together all that kThreads have at the start.
  static constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
  static constexpr int kRowBytes = 128;  // of a step of D
  static constexpr int kStepK = kRowBytes / sizeof(Element);
  static constexpr int kStages = kStages_;
  static constexpr int kItems = 4;
  using Tiles = MatrixTiles<kTileM, 64, kTileN>;
  static_assert(kTileN <= 64 * kProducers);
};

template <typename Config>
struct MatricesStreamStorage {
  using Element = typename Config::Element;
  using XTile = WarpgroupTile<Element, Config::kTileM, Config::kStepK>;
  using YTile = WarpgroupTile<Element, Config::kTileN, Config::kStepK>;
  struct Stage {
    XTile sX;
    YTile sY;
  };
  Stage stages[Config::kStages];
  RaggedBand<Element, Config::kTileN> bands[Config::kComputingWarps];
  Ring<Config::kStages> ring;
  Ring<Config::kItems> items;
  MatrixTile item[Config::kItems];
};

// Tensor maps of one operand: boxes of 128 bytes and of as many rows.
struct StreamBoxes {
  CUtensorMap rows_64, rows_32;
};

struct MatricesStreamParams {
  StreamBoxes x, y;
  JaggedJaggedBmmJaggedOutParams product;
};

// Rows of part `part`, of 64, of a tile with `rows` rows: by 32, as copies bring them.
__device__ __forceinline__ int copied_rows(int rows, int part) {
  return min(max((rows - 64 * part + 31) / 32 * 32, 0), 64);
}

// Copies the operands of all tiles; producer `own` of kProducers, a warp. The first publishes the tiles.
template <typename Config>
__device__ __forceinline__ void produce(const MatricesStreamParams& launch,
                                        MatricesStreamStorage<Config>& shared, int own) {
  constexpr int kStepK = Config::kStepK;
  RingPosition<Config::kItems> place;
  RingPosition<Config::kStages> position;
  const bool leads = threadIdx.x % 32 == 0;
  const int inner = static_cast<int>(launch.product.inner);
  const auto publish = [&](const MatrixTile& tile) {
    shared.items.acquire(place);
    shared.item[place.stage] = tile;
    shared.items.publish(place.stage);
    place.advance();
  };
  Config::Tiles::walk(launch.product.matrices, blockIdx.x, gridDim.x, [&](const MatrixTile& tile) {
    if (leads) {
      if (own == 0) publish(tile);
      // Each starts a box of y, the last two also one of x.
      const int x_part = Config::kProducers - 1 - own,
                x_rows = x_part < 2 ? copied_rows(tile.rows, x_part) : 0,
                y_rows = copied_rows(tile.columns, own);
      const CUtensorMap& x = x_rows == 64 ? launch.x.rows_64 : launch.x.rows_32;
      const CUtensorMap& y = y_rows == 64 ? launch.y.rows_64 : launch.y.rows_32;
      for (int k = 0; k < inner; k += kStepK) {
        shared.ring.acquire(position);
        auto& stage = shared.stages[position.stage];
        uint64_t& full = shared.ring.full[position.stage];
        ptx::mbarrier_arrive_expect_tx(full, (x_rows + y_rows) * Config::kRowBytes);
        if (x_rows > 0) {
          ptx::cp_async_bulk_tensor_3d(stage.sX.data + x_part * 64 * kStepK, x, k, 0,
                                       tile.x_row + x_part * 64, full);
        }
        if (y_rows > 0) {
          ptx::cp_async_bulk_tensor_3d(stage.sY.data + own * 64 * kStepK, y, k, 0,
                                       tile.y_row + own * 64, full);
        }
        position.advance();
      }
    }
    __syncwarp();
  });
  if (leads && own == 0) {
    MatrixTile end = {};
    end.is_end = true;
    publish(end);
  }
}

// A warpgroup that computes 64 rows of each tile.
template <typename Config>
struct MatricesStreamConsumer {
  using Element = typename Config::Element;
  using Storage = MatricesStreamStorage<Config>;

  Storage& shared;
  const int steps;
  Element* const gOut;
  RingPosition<Config::kStages> position;

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 == 0) shared.ring.release(stage);
  }

  // Of a tile in which this warpgroup has no rows.
  __device__ __forceinline__ void skip() {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      shared.ring.wait(position);
      release(position.advance());
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void compute(const MatrixTile& tile) {
    const int warp = threadIdx.x / 32, row = warp / 4 * 64;
    float sum[kBlocks][4] = {};
    int last = -1;  // the stage of the product in flight
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      shared.ring.wait(position);
      auto& stage = shared.stages[position.stage];
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor x_rows = stage.sX.descriptor(row), y_rows = stage.sY.descriptor();
#pragma unroll
      for (int k = 0; k < Config::kStepK; k += 16) {
        ptx::WideWgmma<Element>::run(sum, x_rows + Storage::XTile::column_step_bytes(k),
                                     y_rows + Storage::YTile::column_step_bytes(k));
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (last >= 0) release(last);
      last = position.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    release(last);
    auto& band = shared.bands[warp];
    band.end_store();  // of the tile before
    __syncwarp();
    band.store(sum, gOut + tile.first + int64_t{16 * warp} * tile.pitch, tile.pitch,
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
      if (tile.is_end) break;
      if (static_cast<int>(threadIdx.x) / 128 * 64 >= tile.rows) {
        skip();
      } else if (tile.columns <= 64) {
        compute<8>(tile);
      } else if (tile.columns <= 128) {
        compute<16>(tile);
      } else if (tile.columns <= 192) {
        compute<24>(tile);
      } else if (tile.columns <= 224) {
        compute<28>(tile);
      } else if constexpr (Config::kTileN > 224) {
        compute<32>(tile);
      }
    }
    shared.bands[threadIdx.x / 32].end_store();
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void jagged_jagged_bmm_jagged_out_stream(
    const __grid_constant__ MatricesStreamParams launch) {
  using Element = typename Config::Element;
  extern __shared__ __align__(1024) char matrices_stream_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<MatricesStreamStorage<Config>*>(matrices_stream_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  if (threadIdx.x == 0) {
    for (const StreamBoxes* boxes : {&launch.x, &launch.y}) {
      ptx::prefetch_tensormap(boxes->rows_64);
      ptx::prefetch_tensormap(boxes->rows_32);
    }
    shared.ring.init(Config::kComputingWarps, Config::kProducers);
    shared.items.init(Config::kComputingWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised
  // The same in all lanes, as the compiler then sees.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Config::kComputingWarps) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce<Config>(launch, shared, warp - Config::kComputingWarps);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Element* gOut = static_cast<Element*>(params.out);
    zero_all_outside<Config::kComputingWarps * 32>(params.matrices, gOut);
    const int inner = static_cast<int>(params.inner);
    MatricesStreamConsumer<Config> consumer{
        shared, (inner + Config::kStepK - 1) / Config::kStepK, gOut, {}};
    consumer.run();
  }
}

template <typename Element>
constexpr PathName kPath =
    PathName("cuda.jagged_jagged_bmm_jagged_out.wgmma.stream.") + kElementName<Element>;

template <typename Config>
cudaError_t launch_config(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const OffsetsView &rows = params.matrices.rows, &columns = params.matrices.columns;
  const auto encode = [&](StreamBoxes& boxes, const void* data, int64_t count, int64_t stride) {
    // A tensor without rows is never copied from, but its map must be valid.
    const TensorMapSource source{
        count > 0 ? data : params.out, params.type, count, 1, params.inner, stride, 0};
    const cudaError_t error = encode_tensor_map(boxes.rows_64, source, 64, Config::kStepK);
    if (error != cudaSuccess) return error;
    return encode_tensor_map(boxes.rows_32, source, 32, Config::kStepK);
  };
  MatricesStreamParams launch_params;
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
  return launch<jagged_jagged_bmm_jagged_out_stream<Config>>(
      launch_params, {num_sms}, Config::kThreads, sizeof(MatricesStreamStorage<Config>), stream,
      kPath<typename Config::Element>);
}

// Two stages and a half of a step of D are as many as fit beside the bands.
template <typename Element>
cudaError_t launch_element(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return launch_config<MatricesStreamConfig<Element, 256, 3>>(params, stream);
}

}  // namespace

cudaError_t launch_stream(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, stream)
                                           : launch_element<__half>(params, stream);
}

}  // namespace jagged_cuda::gemm
