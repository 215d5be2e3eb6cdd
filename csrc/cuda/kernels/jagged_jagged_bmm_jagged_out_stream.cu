#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrices.cuh"
#include "cuda/kernels/gemm/ragged_band.cuh"
#include "cuda/kernels/gemm/stream.cuh"
#include "cuda/kernels/jagged_jagged_bmm_jagged_out.h"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ring.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma_wide.cuh"

#include <type_traits>

#ifndef XSLOTS
#define XSLOTS 7
#endif

namespace jagged_cuda::gemm {
namespace {

#ifdef STAMP
__device__ long long g_stamps[132 * 4 * 12];
#define CLOCK(name) const long long name = clock64();
#define ADD(i, a, b) stamps[i] += (b) - (a);
#else
#define CLOCK(name)
#define ADD(i, a, b)
#endif
template <typename Element_>
struct StreamConfig {
  using Element = Element_;
  #ifndef UNITM
#define UNITM 16
#endif
  static constexpr int kBlockM = 64, kTileN = 224;  // at most
  static constexpr int kUnitM = UNITM;
  static constexpr int kYRows = 256;  // of all steps in a slot
  static constexpr int kGroups = 2;     // computing warpgroups
  static constexpr int kProducers = 4;  // warps: one of x, one for each size of y's boxes
  static constexpr int kComputingWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * (kComputingWarps + kProducers);
  static constexpr int kRowBytes = 128;  // of a step of D
  static constexpr int kStepK = kRowBytes / sizeof(Element);
  static constexpr int kXSlots = XSLOTS, kYSlots = 4, kItems = 4;
};

// Blocks of rows of one matrix, and columns that share a tile of y.
struct StreamItem {
  int64_t first;  // its first element in the result
  int pitch;
  int rows, columns;
  int x_row, y_row;  // of the whole tensors
  int group;         // the warpgroup of its first block; -1: there are no more items

  // Few columns: a slot holds several steps.
  __device__ __forceinline__ int steps_in_slot() const {
    return columns <= 64 ? 4 : columns <= 128 ? 2 : 1;
  }
  template <typename Config>
  __device__ __forceinline__ bool is_resident(int steps) const {
    return steps <= steps_in_slot() * Config::kYSlots;
  }
};

template <typename Config>
struct StreamStorage {
  using Element = typename Config::Element;
  using XTile = WarpgroupTile<Element, Config::kBlockM, Config::kStepK>;
  using YTile = WarpgroupTile<Element, Config::kYRows, Config::kStepK>;
  XTile sX[Config::kXSlots];
  YTile sY[Config::kYSlots];
  RaggedBand<Element, Config::kTileN, 8> bands[Config::kComputingWarps];
  Ring<Config::kXSlots> x;
  Ring<Config::kYSlots> y;
  Ring<Config::kItems> items;
  StreamItem item[Config::kItems];
};

struct StreamBoxes {
  CUtensorMap rows_128, rows_64, rows_32;
};

struct StreamParams {
  StreamBoxes x, y;
  JaggedJaggedBmmJaggedOutParams product;
};

template <typename Config>
__device__ __forceinline__ void produce(const StreamParams& launch, StreamStorage<Config>& shared,
                                        int own) {
  constexpr int kStepK = Config::kStepK, kBlockM = Config::kBlockM;
  RingPosition<Config::kItems> place;
  RingPosition<Config::kXSlots> x_place;
  RingPosition<Config::kYSlots> y_place;
  const bool leads = threadIdx.x % 32 == 0;
  const int inner = static_cast<int>(launch.product.inner), steps = (inner + kStepK - 1) / kStepK;
  int group = 0;
  const auto publish = [&](const StreamItem& item, int first_group) {
    shared.items.acquire(place);
    shared.item[place.stage] = item;
    shared.item[place.stage].group = first_group;
    shared.items.publish(place.stage);
    place.advance();
  };
  const auto copy_x = [&](const StreamItem& item, int block, int step) {
    shared.x.acquire(x_place);
    uint64_t& full = shared.x.full[x_place.stage];
    const bool whole = item.rows - block * kBlockM > 32;
    ptx::mbarrier_arrive_expect_tx(full, (whole ? 64 : 32) * Config::kRowBytes);
    ptx::cp_async_bulk_tensor_3d(shared.sX[x_place.stage].data,
                                 whole ? launch.x.rows_64 : launch.x.rows_32, step * kStepK, 0,
                                 item.x_row + block * kBlockM, full);
    x_place.advance();
  };
  // Box 3 - own of y has as many rows as the bit of their number that it is.
  const auto copy_y = [&](const StreamItem& item) {
    const int rows = (item.columns + 31) / 32 * 32, box = 256 >> own;
    const bool has_box = (rows & box) != 0;
    const int before = rows & ~(2 * box - 1);
    const CUtensorMap& map =
        own == 1 ? launch.y.rows_128 : own == 2 ? launch.y.rows_64 : launch.y.rows_32;
    const int in_slot = item.steps_in_slot();
    for (int first = 0; first < steps; first += in_slot) {
      const int count = min(in_slot, steps - first);
      shared.y.acquire(y_place);
      uint64_t& full = shared.y.full[y_place.stage];
      ptx::mbarrier_arrive_expect_tx(full, has_box ? count * box * Config::kRowBytes : 0);
      if (has_box) {
        for (int i = 0; i < count; ++i) {
          const int row = i * (Config::kYRows / in_slot) + before;
          ptx::cp_async_bulk_tensor_3d(shared.sY[y_place.stage].data + row * kStepK, map,
                                       (first + i) * kStepK, 0, item.y_row + before, full);
        }
      }
      y_place.advance();
    }
  };
  const auto units_of = [&](const Matrix& matrix) {
    if (!matrix.fits || matrix.columns.len == 0) return Units{0, 0};
    return Units{static_cast<int>((matrix.rows.len + Config::kUnitM - 1) / Config::kUnitM),
                 static_cast<int>((matrix.columns.len + Config::kTileN - 1) / Config::kTileN)};
  };
  const MatricesView& matrices = launch.product.matrices;
  walk_blocks(matrices, matrices.rows, 2 * int64_t{inner}, 1 << 20, units_of,
              [&](const BlockRange& range) {
    if (leads) {
      const int pitch = static_cast<int>(range.columns.len);
      // Tiles alike, of a multiple of 32 columns.
      const int tiles = (pitch + Config::kTileN - 1) / Config::kTileN;
      const int width = ((pitch + tiles - 1) / tiles + 31) / 32 * 32, column = range.tile * width;
      StreamItem item;
      item.pitch = pitch;
      item.columns = min(width, pitch - column);
      item.y_row = static_cast<int>(range.columns.begin) + column;
      const bool is_resident = item.is_resident<Config>(steps);
      const int end = min((range.block + range.count) * Config::kUnitM,
                          static_cast<int>(range.rows.len));
      const int most = is_resident ? end : Config::kGroups * kBlockM;
      for (int row = range.block * Config::kUnitM; row < end; row += most) {
        item.first = range.begin + int64_t{row} * pitch + column;
        item.rows = min(most, end - row);
        item.x_row = static_cast<int>(range.rows.begin) + row;
        const int blocks = (item.rows + kBlockM - 1) / kBlockM;
        if (own == 0) {
          publish(item, group);
          group = (group + blocks) % Config::kGroups;
          // Block after block, or, where both wait for the same y, step after step.
          for (int i = 0; i < blocks * steps; ++i) {
            copy_x(item, is_resident ? i / steps : i % blocks,
                   is_resident ? i % steps : i / blocks);
          }
        } else {
          copy_y(item);
        }
      }
    }
    __syncwarp();
  });
  if (leads && own == 0) publish({}, -1);
}

template <typename Config>
struct StreamConsumer {
  using Element = typename Config::Element;
  using Storage = StreamStorage<Config>;

  Storage& shared;
  const int steps;
  Element* const gOut;
  const int warp, group;
#ifdef STAMP
  long long stamps[12] = {};
#endif

  template <int kBlocks>
  __device__ __forceinline__ void compute(const StreamItem& item, int block,
                                          Place<Config::kXSlots> x_place, int x_stride,
                                          Place<Config::kYSlots> y_place, bool frees_y) {
    float sum[kBlocks][4] = {};
    const int in_slot = item.steps_in_slot();
    int within = 0;  // the slot of y
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      CLOCK(a0)
      ptx::mbarrier_wait(shared.x.full[x_place.slot], x_place.parity);
      CLOCK(a1)
      if (within == 0) ptx::mbarrier_wait(shared.y.full[y_place.slot], y_place.parity);
      CLOCK(a2)
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor x_rows = shared.sX[x_place.slot].descriptor(),
                                  y_rows = shared.sY[y_place.slot].descriptor(
                                      within * (Config::kYRows / in_slot));
#pragma unroll
      for (int k = 0; k < Config::kStepK; k += 16) {
#ifndef NOMATH
        ptx::WideWgmma<Element>::run(sum, x_rows + Storage::XTile::column_step_bytes(k),
                                     y_rows + Storage::YTile::column_step_bytes(k));
#endif
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(sum);
      CLOCK(a3)
      ADD(0, a0, a1) ADD(1, a1, a2) ADD(2, a2, a3)
      if (threadIdx.x % 32 == 0) {
        shared.x.release(x_place.slot);
      }
      x_place.advance(x_stride);
      if (++within == in_slot || step + 1 == steps) {
        if (frees_y && threadIdx.x % 32 == 0) shared.y.release(y_place.slot);
        y_place.advance(1);
        within = 0;
      }
    }
    CLOCK(a4)
    auto& band = shared.bands[warp];
    band.end_store();  // of the block before
    __syncwarp();
    const int row = block * Config::kBlockM + warp % 4 * 16;
#ifdef NOSTORE
    if (sum[0][0] == 12345.0f)
#endif
    band.store(sum, gOut + item.first + int64_t{row} * item.pitch, item.pitch, item.rows - row,
               item.columns);
    CLOCK(a5)
    ADD(3, a4, a5)
#ifdef STAMP
    stamps[4] += 1;
#endif
  }

  __device__ __forceinline__ void run() {
    CLOCK(b0)
    RingPosition<Config::kItems> place;
    Place<Config::kXSlots> x_place;
    Place<Config::kYSlots> y_place;
    for (;;) {
      CLOCK(b1)
      shared.items.wait(place);
      CLOCK(b2)
      ADD(5, b1, b2)
      const StreamItem item = shared.item[place.stage];
      __syncwarp();
      const int stage = place.advance();
      if (threadIdx.x % 32 == 0) shared.items.release(stage);
      if (item.group < 0) break;
#ifdef STAMP
      stamps[7] += 1; stamps[8] += item.rows; stamps[9] += (long long)item.rows * item.columns;
#endif
      const int blocks = (item.rows + Config::kBlockM - 1) / Config::kBlockM;
      const int own = (group + Config::kGroups - item.group) % Config::kGroups;
      const bool by_blocks = item.is_resident<Config>(steps);
      const int y_slots = (steps + item.steps_in_slot() - 1) / item.steps_in_slot();
      if (own >= blocks) {
        Place<Config::kYSlots> skipped = y_place;
        for (int i = 0; i < y_slots; ++i) {
          ptx::mbarrier_wait(shared.y.full[skipped.slot], skipped.parity);
          if (threadIdx.x % 32 == 0) shared.y.release(skipped.slot);
          skipped.advance(1);
        }
      }
#pragma unroll 1
      for (int block = 0; block < blocks; block += by_blocks ? 1 : Config::kGroups) {
        const int count = by_blocks ? 1 : min(Config::kGroups, blocks - block);
        const int mine = by_blocks ? (block % Config::kGroups == own ? block : blocks) : block + own;
        if (mine < blocks) {
          Place<Config::kXSlots> at = x_place;
          if (!by_blocks) at.advance(own);
          const bool frees_y = mine + Config::kGroups >= blocks;
          if (item.columns <= 64) {
            compute<8>(item, mine, at, count, y_place, frees_y);
          } else if (item.columns <= 128) {
            compute<16>(item, mine, at, count, y_place, frees_y);
          } else if (item.columns <= 192) {
            compute<24>(item, mine, at, count, y_place, frees_y);
          } else {
            compute<28>(item, mine, at, count, y_place, frees_y);
          }
        }
        x_place.advance(count * steps);
      }
      y_place.advance(y_slots);
    }
    shared.bands[warp].end_store();
    CLOCK(b3)
    ADD(6, b0, b3)
#ifdef STAMP
    if (threadIdx.x % 128 == 0) for (int i = 0; i < 12; ++i) g_stamps[(blockIdx.x * 4 + group) * 12 + i] = stamps[i];
#endif
  }
};

// Zeros in all elements that belong to no matrix, by the first kThreads threads of every CTA.
template <int kThreads, typename Element>
__device__ __forceinline__ void zero_all_outside(const MatricesView& matrices, Element* global) {
  const MatricesExtent extent = matrices_extent(matrices);
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first; i < extent.begin; i += step) global[i] = Element(0.0f);
  for (int64_t i = extent.end + first; i < matrices.capacity; i += step) global[i] = Element(0.0f);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void jagged_jagged_bmm_jagged_out_stream(
    const __grid_constant__ StreamParams launch) {
  using Element = typename Config::Element;
  extern __shared__ __align__(1024) char stream_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<StreamStorage<Config>*>(stream_shared_bytes);
  const JaggedJaggedBmmJaggedOutParams& params = launch.product;
  if (threadIdx.x == 0) {
    shared.x.init(4);
    shared.y.init(Config::kComputingWarps, Config::kProducers - 1);
    shared.items.init(Config::kComputingWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised
  // The same in all lanes, as the compiler then sees.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Config::kComputingWarps) {
    produce<Config>(launch, shared, warp - Config::kComputingWarps);
  } else {
    Element* gOut = static_cast<Element*>(params.out);
    zero_all_outside<Config::kComputingWarps * 32>(params.matrices, gOut);
    const int inner = static_cast<int>(params.inner);
    StreamConsumer<Config>{shared, (inner + Config::kStepK - 1) / Config::kStepK, gOut, warp,
                           warp / 4}
        .run();
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
    cudaError_t error = encode_tensor_map(boxes.rows_128, source, 128, Config::kStepK);
    if (error == cudaSuccess) error = encode_tensor_map(boxes.rows_64, source, 64, Config::kStepK);
    if (error == cudaSuccess) error = encode_tensor_map(boxes.rows_32, source, 32, Config::kStepK);
    return error;
  };
  StreamParams launch_params;
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
      launch_params, {num_sms}, Config::kThreads, sizeof(StreamStorage<Config>), stream,
      kPath<typename Config::Element>);
}

}  // namespace

#ifdef STAMP
void read_stamps(void* to, int) { cudaMemcpyFromSymbol(to, g_stamps, sizeof(g_stamps)); }
#endif
cudaError_t launch_stream(const JaggedJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_config<StreamConfig<__nv_bfloat16>>(params, stream)
                                           : launch_config<StreamConfig<__half>>(params, stream);
}

}  // namespace jagged_cuda::gemm
