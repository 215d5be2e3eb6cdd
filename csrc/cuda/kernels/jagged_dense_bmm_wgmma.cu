// jagged_dense_bmm on wgmma and TMA (compute capability 9.0), 16-bit elements: z_b = activation(x_b
// y_b + bias_b) for each sequence b, f32 sums; y_b with stride 1 along either dimension.
//
// Grid: as many CTAs as run at once. Their items are the virtual tiles of kTileM rows
// (prim/jagged.cuh), each times the parts of N, more than one only above 256 columns; a CTA takes
// every gridDim.x-th item, so that tiles of one sequence, which read the same y_b, run at the same
// time. Two warps fill a ring of stages, one with x, the other with y; each finds 32 tiles at once,
// one in each lane (prim/lane_search.cuh). Warpgroups multiply, 64 rows each, one warp 16 of them.
//
//     fillers:      for each tile with rows:   for each 64 of D:   wait until a stage is empty
//                                                                  start its copies
//     warpgroups:   for each tile:   for each 64 of D:   wait for the stage
//                                                        wait for the product before, empty its stage
//                                                        start the product
//                                    bias, activation; store
//
// Tensor cores truncate as they add: every kSumDepth of D the sum is added to a rounded one
// (RoundedSum).
//
// Storing: a warp turns its rows in shared memory, from which they leave as 16-byte chunks, a row or
// more at once.
//
// Shared memory: kStages stages of x [kTileM, 64] and y [64, kTileN] (y with stride 1 along D:
// [kTileN, 64]); a band [16, kTileN] for each warp that multiplies, which has the tile's biases first;
// what the fillers know of a tile, beside its first stage. 89, 97 and 209 KiB for kTileN = 64, 128 and 256.
//
// Barriers: full[stage], on which the bytes of a stage complete; each filler arrives, all threads that
// multiply wait. empty[stage]: all these arrive when they have read the stage, each filler waits.
// __syncwarp before and after a band is read.
//
// Virtual tiles without rows are passed over; rows outside every sequence take one stage without
// copies and become zeros. Copies bring rows by 32, so they may reach into the next sequence: such
// rows of the product are not stored, nor are rows and columns of a stage that no copy has filled.
// Past D both operands are zeros, and y's copies never leave their matrix: no NaN of another reaches
// a sum.
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/jagged_dense_bmm.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/lane_search.cuh"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/overlap.cuh"
#include "cuda/kernels/prim/ring.cuh"

namespace jagged_cuda::gemm {
namespace {

template <typename Element_, int kTileN_, int kWarpgroups_, int kStages_, int kMinCtas_>
struct DenseWgmmaConfig {
  using Element = Element_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_, kMinCtas = kMinCtas_;
  static constexpr int kTileM = 64 * kWarpgroups, kTileN = kTileN_;
  static constexpr int kStepK = 64;  // 128 bytes
  static constexpr int kFillers = 2, kWarps = 4 * kWarpgroups;
  static constexpr int kThreads = 32 * (kWarps + kFillers);
  static constexpr int kPart = 64;  // columns of a copy of y
  static_assert(kTileN % kPart == 0 && kTileN <= 256);
};

// What the warps that multiply must know of a tile; no rows: there are no more tiles.
struct TileTask {
  int global_row;
  int seq;  // -1 outside every sequence
  int rows;
  int column, columns;
};

template <typename Config>
struct DenseWgmmaStorage {
  using Element = typename Config::Element;
  using XTile = WarpgroupTile<Element, 64, Config::kStepK>;
  // y_b with stride 1 along N, or along D.
  using YTile = WarpgroupTile<Element, Config::kStepK, Config::kTileN>;
  using YLinesTile = WarpgroupTile<Element, Config::kTileN, Config::kStepK>;
  using Band = SharedTile<Element, 16, Config::kTileN>;
  static_assert(sizeof(YTile) == sizeof(YLinesTile));

  XTile sX[Config::kStages][Config::kWarpgroups];
  union {
    YTile sY[Config::kStages];
    YLinesTile sYLines[Config::kStages];
  };
  Band bands[Config::kWarps];
  TileTask tasks[Config::kStages];
  Ring<Config::kStages> ring;
};

struct DenseWgmmaLaunch {
  CUtensorMap x_64, x_32;  // boxes of as many rows and 64 of D
  CUtensorMap y;           // boxes of 64 columns and 64 of D, or of y_lines columns and 64 of D
  JaggedDenseBmmParams product;
  uint32_t items;
  uint32_t parts;    // of N
  int columns_each;  // of a part
  int y_lines;
};

// ---- Filling -----------------------------------------------------------------------------------

// Rows of a warpgroup as copies bring them: all that exist, by 32.
__device__ __forceinline__ int copied_rows(int rows) {
  return rows <= 0 ? 0 : rows <= 32 ? 32 : 64;
}

// Starts the copies of x for one step; one thread alone.
template <typename Config>
__device__ __forceinline__ void copy_x(DenseWgmmaStorage<Config>& shared,
                                       const DenseWgmmaLaunch& launch, int stage,
                                       const TileTask& task, int k) {
  uint64_t& full = shared.ring.full[stage];
  int rows = 0;
#pragma unroll
  for (int i = 0; i < Config::kWarpgroups; ++i) rows += copied_rows(task.rows - 64 * i);
  ptx::mbarrier_arrive_expect_tx(full, rows * Config::kStepK * sizeof(typename Config::Element));
#pragma unroll
  for (int i = 0; i < Config::kWarpgroups; ++i) {
    const int copied = copied_rows(task.rows - 64 * i);
    if (copied == 0) break;
    ptx::cp_async_bulk_tensor_3d(shared.sX[stage][i].data, copied == 64 ? launch.x_64 : launch.x_32,
                                 k, 0, task.global_row + 64 * i, full);
  }
}

// The same of y.
template <typename Config>
__device__ __forceinline__ void copy_y(DenseWgmmaStorage<Config>& shared,
                                       const DenseWgmmaLaunch& launch, int stage,
                                       const TileTask& task, int k) {
  constexpr int kElementBytes = sizeof(typename Config::Element), kPart = Config::kPart;
  uint64_t& full = shared.ring.full[stage];
  if (launch.product.y_along_inner) {
    ptx::mbarrier_arrive_expect_tx(full, launch.y_lines * Config::kStepK * kElementBytes);
    ptx::cp_async_bulk_tensor_3d(shared.sYLines[stage].data, launch.y, k, task.column, task.seq,
                                 full);
    return;
  }
  const int parts = (task.columns + kPart - 1) / kPart;
  ptx::mbarrier_arrive_expect_tx(full, parts * kPart * Config::kStepK * kElementBytes);
  for (int part = 0; part < parts; ++part) {
    ptx::cp_async_bulk_tensor_3d(shared.sY[stage].data + part * kPart * Config::kStepK, launch.y,
                                 task.column + part * kPart, k, task.seq, full);
  }
}

// One warp's copies of all tiles of this CTA: filler 0 those of x, filler 1 those of y. Of 32 items
// each lane finds one; the first lane starts the copies of all.
template <typename Config>
__device__ __forceinline__ void fill(DenseWgmmaStorage<Config>& shared,
                                     const DenseWgmmaLaunch& launch, int filler) {
  using Element = typename Config::Element;
  const JaggedDenseBmmParams& params = launch.product;
  const uint32_t lane = threadIdx.x % 32;
  typename Ring<Config::kStages>::Position position;  // of the first lane
  for (uint32_t first = blockIdx.x; first < launch.items; first += 32 * gridDim.x) {
    const uint32_t own_item = first + lane * gridDim.x;
    int own_rows = 0, own_row = 0, own_seq = 0, own_part = 0;
    if (own_item < launch.items) {
      const uint32_t index = launch.parts == 1 ? own_item : own_item / launch.parts;
      const JaggedTile tile = find_tile_of_lane<Config::kTileM>(params.offsets, index);
      own_rows =
          static_cast<int>(max(min(tile.rows.len - tile.row, int64_t{Config::kTileM}), int64_t{0}));
      own_row = static_cast<int>(tile.rows.begin + tile.row);
      own_seq = static_cast<int>(tile.seq);
      own_part = static_cast<int>(own_item - index * launch.parts);
    }
    for (unsigned left = __ballot_sync(0xffffffffu, own_rows > 0); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      TileTask task;
      task.global_row = __shfl_sync(0xffffffffu, own_row, from);
      task.seq = __shfl_sync(0xffffffffu, own_seq, from);
      task.rows = __shfl_sync(0xffffffffu, own_rows, from);
      task.column = __shfl_sync(0xffffffffu, own_part, from) * launch.columns_each;
      task.columns = min(launch.columns_each, static_cast<int>(params.columns) - task.column);
      if (lane == 0) {
        const int inner = task.seq < 0 ? 1 : static_cast<int>(params.inner);
        for (int k = 0; k < inner; k += Config::kStepK) {
          shared.ring.acquire(position);
          const int stage = position.advance();
          if (k == 0 && filler == 0) shared.tasks[stage] = task;
          if (task.seq < 0) {
            shared.ring.publish(stage);
          } else if (filler == 0) {
            copy_x(shared, launch, stage, task, k);
          } else {
            copy_y(shared, launch, stage, task, k);
          }
        }
      }
      if (filler == 1 && params.bias != nullptr && task.seq >= 0 && lane * 64 < task.columns) {
        ptx::prefetch_l2(static_cast<const Element*>(params.bias) + task.seq * params.bias_stride +
                         task.column + lane * 64);
      }
      __syncwarp();
    }
  }
  if (lane == 0) {
    shared.ring.acquire(position);
    if (filler == 0) shared.tasks[position.stage].rows = 0;
    shared.ring.publish(position.stage);
  }
}

// ---- Multiplying -------------------------------------------------------------------------------

// Starts the product of a warpgroup's 64 rows over one stage.
template <typename Config>
__device__ __forceinline__ void start_product(float (&sum)[Config::kTileN / 8][4],
                                              const DenseWgmmaStorage<Config>& shared, int stage,
                                              int warpgroup, bool y_along_inner) {
  using Element = typename Config::Element;
  using Storage = DenseWgmmaStorage<Config>;
  using XTile = typename Storage::XTile;
  using YTile = typename Storage::YTile;
  using YLinesTile = typename Storage::YLinesTile;
  const ptx::MatrixDescriptor x = shared.sX[stage][warpgroup].descriptor().uniform();
  if (y_along_inner) {
    const ptx::MatrixDescriptor y = shared.sYLines[stage].descriptor().uniform();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kStepK; k += 16) {
      ptx::Wgmma<Element, false>::run(sum, x + XTile::column_step_bytes(k),
                                      y + YLinesTile::column_step_bytes(k), true);
    }
    ptx::wgmma_commit_group();
  } else {
    const ptx::MatrixDescriptor y = shared.sY[stage].descriptor().uniform();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kStepK; k += 16) {
      ptx::Wgmma<Element, true>::run(sum, x + XTile::column_step_bytes(k),
                                     y + YTile::row_step_bytes(k), true);
    }
    ptx::wgmma_commit_group();
  }
}

// Brings the biases of `columns` columns, a multiple of 8 and at most 256, to a warp's shared memory.
template <typename Element>
__device__ __forceinline__ void load_biases(Element* sBiases, const Element* gBiases, int columns) {
  const int column = threadIdx.x % 32 * 8;
  if (column < columns) {
    if (reinterpret_cast<uintptr_t>(gBiases) % 16 == 0) {
      *reinterpret_cast<uint4*>(sBiases + column) =
          *reinterpret_cast<const uint4*>(gBiases + column);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) sBiases[column + i] = gBiases[column + i];
    }
  }
  __syncwarp();
}

template <typename Element, int kBlocks>
__device__ __forceinline__ void add_biases(float (&sum)[kBlocks][4], const Element* sBiases) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const auto two =
        *reinterpret_cast<const Vector<Element, 2>*>(sBiases + block * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[block][i] += to_sum(two.elems[i % 2]);
  }
  __syncwarp();  // their place is free
}

// Applies an activation to a warp's sums, 32 columns at a time, after which the next ones take their
// place, so that the code of all but the shortest stands once.
template <int kBlocks>
__device__ __forceinline__ void activate_sums(float (&sum)[kBlocks][4], Activation activation) {
  constexpr int kFront = 4;
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      sum[i / 4][i % 4] = activate<Activation::kRelu>(sum[i / 4][i % 4]);
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < kBlocks; first += kFront) {
    float front[kFront * 4];
#pragma unroll
    for (int i = 0; i < kFront * 4; ++i) front[i] = sum[i / 4][i % 4];
    activate(front, activation);
#pragma unroll
    for (int i = 0; i < (kBlocks - kFront) * 4; ++i) {
      sum[i / 4][i % 4] = sum[kFront + i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < kFront * 4; ++i) sum[kBlocks - kFront + i / 4][i % 4] = front[i];
  }
}

// Stores `rows` rows and `columns` columns of a warp's sums at `gOut`.
template <typename Band, int kBlocks>
__device__ __forceinline__ void store_sums(const float (&sum)[kBlocks][4], Band& band,
                                           typename Band::Element* gOut, int64_t pitch, int rows,
                                           int columns) {
  using Element = typename Band::Element;
  constexpr int kLanes = Band::kChunks < 32 ? Band::kChunks : 32;  // of a row
  constexpr int kRowStep = 32 / kLanes;
  constexpr int kStores = 4;  // of a lane, whose loads run at once
  static_assert(kBlocks * 8 == Band::kColumns && Band::kChunks <= 32);
  const int lane = threadIdx.x % 32, first_row = lane / kLanes, chunk = lane % kLanes;
#pragma unroll
  for (int i = 0; i < kBlocks; i += 2) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float (&block)[4] = sum[i + j / 2];
      words[j] = pack<Element>(block[j % 2 * 2], block[j % 2 * 2 + 1]);
    }
    ptx::stmatrix_x4(band.chunk(lane % 16, i + lane / 16), words);
  }
  __syncwarp();  // all of the band is there
  gOut += first_row * pitch + chunk * Band::kChunkElems;
  const bool exists = chunk * Band::kChunkElems < columns;
#pragma unroll
  for (int row = 0; row < 16; row += kRowStep * kStores) {
    if (row >= rows) break;
    uint4 chunks[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      chunks[i] = ptx::ld_shared_16(band.chunk(row + first_row + kRowStep * i, chunk));
    }
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      if (row + first_row + kRowStep * i < rows && exists) {
        ptx::st_global_16(gOut + (row + kRowStep * i) * pitch, chunks[i]);
      }
    }
  }
  __syncwarp();  // it has been read before the next tile replaces it
}

// All tiles of this CTA, as far as they are this warp's.
template <typename Config>
__device__ __forceinline__ void multiply(DenseWgmmaStorage<Config>& shared,
                                         const DenseWgmmaLaunch& launch) {
  using Element = typename Config::Element;
  constexpr int kBlocks = Config::kTileN / 8;
  const JaggedDenseBmmParams& params = launch.product;
  const int warp = threadIdx.x / 32, warpgroup = warp / 4, own_row = 16 * warp;
  const int steps = static_cast<int>((params.inner + Config::kStepK - 1) / Config::kStepK);
  Element* gAll = static_cast<Element*>(params.out);
  typename Ring<Config::kStages>::Position position;
  for (;;) {
    shared.ring.wait(position);
    const TileTask task = shared.tasks[position.stage];
    if (task.rows == 0) break;
    Element* gOut = gAll + int64_t{task.global_row} * params.columns + task.column;
    if (task.seq < 0) {
      shared.ring.release(position.advance());
      const int chunks = task.columns / 8;
      for (int i = threadIdx.x; i < task.rows * chunks; i += Config::kWarps * 32) {
        ptx::st_global_16(gOut + i / chunks * params.columns + i % chunks * 8,
                          make_uint4(0, 0, 0, 0));
      }
      continue;
    }
    if (task.rows <= 64 * warpgroup) {
      for (int step = 0; step < steps; ++step) {
        shared.ring.wait(position);
        shared.ring.release(position.advance());
      }
      continue;
    }
    float sum[kBlocks][4] = {};
    RoundedSum<kBlocks> rounded;
    int last = 0;  // stage of the product in flight
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      shared.ring.wait(position);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(sum);
      if (step > 0) shared.ring.release(last);
      if (step > 0 && step % (kSumDepth / Config::kStepK) == 0) rounded.add(sum);
      last = position.advance();
      start_product<Config>(sum, shared, last, warpgroup, params.y_along_inner);
    }
    const Element* gBiases = static_cast<const Element*>(params.bias);  // [B, N] or null
    Element* sBiases = reinterpret_cast<Element*>(&shared.bands[warp]);
    if (gBiases != nullptr) {  // on their way while the product ends
      load_biases(sBiases, gBiases + task.seq * params.bias_stride + task.column, task.columns);
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(sum);
    shared.ring.release(last);
    rounded.finish(sum);
    if (task.rows <= own_row) continue;

    if (gBiases != nullptr) add_biases(sum, sBiases);
    if (params.activation != Activation::kNone) activate_sums(sum, params.activation);
    store_sums(sum, shared.bands[warp], gOut + own_row * params.columns, params.columns,
               task.rows - own_row, task.columns);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinCtas) void jagged_dense_bmm_wgmma(
    const __grid_constant__ DenseWgmmaLaunch launch) {
  extern __shared__ __align__(1024) char dense_wgmma_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<DenseWgmmaStorage<Config>*>(dense_wgmma_shared_bytes);
  start_overlapping();
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&launch.x_64, &launch.x_32, &launch.y}) {
      ptx::prefetch_tensormap(*map);
    }
    shared.ring.init(32 * Config::kWarps, Config::kFillers);
    ptx::fence_mbarrier_init();
  }
  // Searches wait for offsets: a thread brings each line of them to L2 before they are asked for.
  const OffsetsView& offsets = launch.product.offsets;
  const int64_t line = (int64_t{threadIdx.x} * gridDim.x + blockIdx.x) * 128;
  if (line < (offsets.num_seqs + 1) * (offsets.wide ? 8 : 4)) {
    ptx::prefetch_l2(static_cast<const char*>(offsets.data) + line);
  }
  __syncthreads();  // the barriers are initialised
  if (warp >= Config::kWarps) {
    fill<Config>(shared, launch, warp - Config::kWarps);
  } else {
    multiply<Config>(shared, launch);
  }
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.jagged_dense_bmm.wgmma.") + kElementName<typename Config::Element>;

template <typename Config>
cudaError_t launch_config(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  constexpr int kPart = Config::kPart;
  const int64_t total = params.offsets.total, num_seqs = params.offsets.num_seqs;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;

  DenseWgmmaLaunch launch_params;
  launch_params.product = params;
  // Parts of N: at most kTileN columns each, and as equal as whole copies of kPart columns allow.
  const int64_t parts = (params.columns + Config::kTileN - 1) / Config::kTileN,
                each = ((params.columns + parts - 1) / parts + kPart - 1) / kPart * kPart;
  launch_params.parts = static_cast<uint32_t>((params.columns + each - 1) / each);
  launch_params.columns_each = static_cast<int>(each);
  launch_params.y_lines = static_cast<int>(each < params.columns ? each : params.columns);
  const int64_t items = num_tiles(total, num_seqs, Config::kTileM) * launch_params.parts;
  launch_params.items = static_cast<uint32_t>(items);

  const TensorMapSource x{params.x, params.type, total, 1, params.inner, params.x_stride, 0};
  const bool along_inner = params.y_along_inner;
  const TensorMapSource y{params.y,
                          params.type,
                          num_seqs,
                          along_inner ? params.columns : params.inner,
                          along_inner ? params.inner : params.columns,
                          params.y_seq_stride,
                          params.y_stride};
  error = encode_tensor_map(launch_params.x_64, x, 64, Config::kStepK);
  if (error == cudaSuccess) error = encode_tensor_map(launch_params.x_32, x, 32, Config::kStepK);
  if (error == cudaSuccess) {
    error = encode_tensor_map(launch_params.y, y, 1, 64,
                              along_inner ? launch_params.y_lines : Config::kStepK);
  }
  if (error != cudaSuccess) return error;
  const int64_t ctas = int64_t{num_sms} * Config::kMinCtas;
  return launch_overlapping<jagged_dense_bmm_wgmma<Config>>(
      params.overlaps, launch_params, {items < ctas ? items : ctas}, Config::kThreads,
      sizeof(DenseWgmmaStorage<Config>), stream, kPath<Config>);
}

// Two warpgroups read y_b once for 128 rows; as many stages and CTAs per SM as fit beside the bands.
// Chosen by time on an H100 (docs/performance_log.md).
template <typename Element>
cudaError_t launch_element(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  if (params.columns <= 64) {
    return launch_config<DenseWgmmaConfig<Element, 64, 2, 3, 2>>(params, stream);
  }
  if (params.columns <= 128) {
    return launch_config<DenseWgmmaConfig<Element, 128, 2, 2, 2>>(params, stream);
  }
  return launch_config<DenseWgmmaConfig<Element, 256, 2, 3, 1>>(params, stream);
}

}  // namespace

cudaError_t launch_wgmma(const JaggedDenseBmmParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, stream)
                                           : launch_element<__half>(params, stream);
}

}  // namespace jagged_cuda::gemm
