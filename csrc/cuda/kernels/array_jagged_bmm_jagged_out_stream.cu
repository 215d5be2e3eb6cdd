// array_jagged_bmm_jagged_out on wgmma and TMA (compute capability 9.0) by a persistent grid: z_b = A_b
// y_b, or A_b^T y_b, for each sequence b, 16-bit elements, f32 sums.
//
// Grid: one CTA per SM, each with a share of all rows (gemm/matrix_strips.cuh), strips of up to kTileM
// of one sequence, which it computes one after another, kTileN columns at a time. Copies run ahead of
// the products, from strip to strip.
//
//     producers (four warps)                each of two warpgroups, 64 rows of the strip
//     for each strip:                       for each strip and kTileN of its columns:
//       publish it                            for each step i:
//       for each kTileN of its columns:         wait for A_i and y_i; rows past the end become zeros
//         for each step i:                      load A_i into registers
//           copy A_i, y_i to a free stage       start the product of step i, wait for it, free the stage
//                                             store the rows
//
// A_b begins at any element and has any pitch: its lines come as aligned granules by cp.async
// (gemm/shifted.cuh), and a warp picks its fragments from them (gemm/raw_lines.cuh). y_b comes by TMA, a
// box of 64 columns started by each producer. Sums and their order are those of
// array_jagged_bmm_jagged_out_wgmma.cu.
//
// Barriers:           arrives                                      waits
//     items.full      the first producer                           computing warps
//     items.empty     computing warps                              the first producer
//     ring.full       each thread of the producers for its part    computing warps
//                     of A, and each producer for its box of y
//     ring.empty      computing warps, after the product           producers
//     a named one of the computing warps, once rows past the end are zeros
//
// Rows of a matrix that does not fit or has no columns take no step: zeros. Rows outside every sequence
// become zeros while the first copies are under way. A copy of y may reach into the next sequence: its
// rows there become zeros, since 0 times NaN is NaN.
#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/matrix_strips.cuh"
#include "cuda/kernels/gemm/raw_lines.cuh"
#include "cuda/kernels/gemm/shifted.cuh"
#include "cuda/kernels/prim/cp_async_arrive.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/ring.cuh"
#include "cuda/kernels/prim/tma.cuh"

#include <type_traits>

namespace jagged_cuda::gemm {
namespace {

template <typename Element_, int kTileN_, bool kTranspose_, int kStages_>
struct ArrayStreamConfig {
  using Element = Element_;
  static constexpr bool kTranspose = kTranspose_;
  static constexpr int kTileM = 128, kTileN = kTileN_;
  static constexpr int kComputingWarps = 8, kProducers = 4;
  static constexpr int kThreads = 32 * (kComputingWarps + kProducers);
  // Together all that kThreads have at the start.
  static constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
  static constexpr int kStepK = 64, kBox = 64;
  static constexpr int kStages = kStages_;
  static constexpr int kItems = 4;
  using Strips = MatrixStrips<kTileM, 64, kTranspose>;
  static_assert(kTileN <= kBox * kProducers);
};

template <typename Config>
struct ArrayStreamStorage {
  using Element = typename Config::Element;
  using YTile = WarpgroupTile<Element, Config::kStepK, Config::kTileN>;
  static constexpr int kLines = Config::kTranspose ? Config::kStepK : Config::kTileM;
  static constexpr int kElems = Config::kTranspose ? Config::kTileM : Config::kStepK;
  static constexpr int kLine = kElems + 8;  // and the granule that a shift needs
  using Fragments = RawLines<Element, kLine, Config::kTranspose>;
  using Shifted = ShiftedTile<32 * Config::kProducers, kLines, kElems, kLine, Element>;
  // From the first rows of a strip to those of the second warpgroup.
  static constexpr int kSecondRows = Config::kTranspose ? 64 : 64 * kLine;

  struct Stage {
    YTile sY;
    alignas(128) Element sGranules[kLines * kLine];
  };
  Stage stages[Config::kStages];
  Ring<Config::kStages> ring;
  Ring<Config::kItems> items;
  MatrixStrip item[Config::kItems];
};

struct ArrayStreamParams {
  CUtensorMap y, y_half;  // boxes of kStepK rows, and half as many, and kBox columns
  ArrayJaggedBmmJaggedOutParams product;
};

// Copies the operands of all strips; `own` is which producer this warp is. The first publishes the strips.
template <typename Config>
__device__ __forceinline__ void produce(const ArrayStreamParams& launch,
                                        ArrayStreamStorage<Config>& shared, int own) {
  using Element = typename Config::Element;
  using Storage = ArrayStreamStorage<Config>;
  constexpr int kStepK = Config::kStepK, kBox = Config::kBox;
  constexpr bool kTranspose = Config::kTranspose;
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  RingPosition<Config::kItems> place;
  RingPosition<Config::kStages> position;
  const bool leads = threadIdx.x % 32 == 0;
  const Element* gAll = static_cast<const Element*>(params.a);
  const Extent tensor{reinterpret_cast<const char*>(gAll),
                      reinterpret_cast<const char*>(gAll + params.matrices.capacity)};
  const auto publish = [&](const MatrixStrip& strip) {
    shared.items.acquire(place);
    shared.item[place.stage] = strip;
    shared.items.publish(place.stage);
    place.advance();
  };
  Config::Strips::walk(params.matrices, blockIdx.x, gridDim.x, [&](const MatrixStrip& strip) {
    if (leads && own == 0) publish(strip);
    const int rows = strip.rows, depth = strip.depth;
    const int64_t pitch = strip.pitch;
    const Element* gA = gAll + strip.first;
    const bool at_edge =
        depth > 0 && tensor.is_left_by(gA, gA + (kTranspose ? (depth - 1) * pitch + rows
                                                            : (rows - 1) * pitch + depth));
    for (int column = 0; column < params.columns; column += Config::kTileN) {
      const int first_column = column + own * kBox;
      const bool has_box = own * kBox < Config::kTileN && first_column < params.columns;
      const Element* source = gA;
      for (int first = 0; first < depth; first += kStepK) {
        const int exist = min(kStepK, depth - first);
        shared.ring.acquire(position);
        auto& stage = shared.stages[position.stage];
        uint64_t& full = shared.ring.full[position.stage];
        if (leads) {
          const bool half = exist <= kStepK / 2;
          const int bytes = kBox * (half ? kStepK / 2 : kStepK) * sizeof(Element);
          ptx::mbarrier_arrive_expect_tx(full, has_box ? bytes : 0);
          if (has_box) {
            ptx::cp_async_bulk_tensor_3d(stage.sY.data + own * kBox * kStepK,
                                         half ? launch.y_half : launch.y, first_column, 0,
                                         strip.y_row + first, full);
          }
        }
        __syncwarp();
        Storage::Shifted::copy_by(threadIdx.x % (32 * Config::kProducers), stage.sGranules, source,
                                  pitch, kTranspose ? exist : rows, kTranspose ? rows : exist,
                                  at_edge, tensor);
        if (at_edge) __threadfence_block();  // what was stored by hand, before the arrival
        ptx::cp_async_mbarrier_arrive_noinc(full);
        source += kTranspose ? kStepK * pitch : kStepK;
        position.advance();
      }
    }
  });
  if (leads && own == 0) {
    MatrixStrip end = {};
    end.is_end = true;
    publish(end);
  }
  ptx::cp_async_wait<0>();
}

// A warpgroup that computes 64 rows of each strip.
template <typename Config>
struct ArrayStreamConsumer {
  using Element = typename Config::Element;
  using Storage = ArrayStreamStorage<Config>;
  using YTile = typename Storage::YTile;
  static constexpr int kStepK = Config::kStepK, kBlocks = Config::kTileN / 8;
  static constexpr int kThreads = 32 * Config::kComputingWarps;

  Storage& shared;
  const ArrayJaggedBmmJaggedOutParams& params;
  const int warp;
  RingPosition<Config::kStages> position;

  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 == 0) shared.ring.release(stage);
  }

  // Waits for a step; of y only `exist` rows are of this sequence.
  __device__ __forceinline__ void wait(int exist) {
    shared.ring.wait(position);
    if (exist >= kStepK) return;
    YTile& sY = shared.stages[position.stage].sY;
    const int behind = (exist + 15) / 16 * 16;  // as many are multiplied
    for (int i = threadIdx.x; i < (behind - exist) * YTile::kChunks; i += kThreads) {
      *reinterpret_cast<uint4*>(sY.chunk(exist + i / YTile::kChunks, i % YTile::kChunks)) =
          make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    constexpr int kZeroed = 1;
    ptx::bar_sync(kZeroed, kThreads);
  }

  // Of a strip in which this warpgroup has no rows.
  __device__ __forceinline__ void skip(int depth) {
#pragma unroll 1
    for (int first = 0; first < depth; first += kStepK) {
      wait(depth - first);
      release(position.advance());
    }
  }

  __device__ __forceinline__ void compute(const MatrixStrip& strip, int column) {
    const int second = warp / 4;
    const Element* gA = static_cast<const Element*>(params.a) + strip.first;
    const typename Storage::Fragments lines(
        shared.stages[0].sGranules + second * Storage::kSecondRows,
        gA + second * (Config::kTranspose ? 64 : 64 * int64_t{strip.pitch}), strip.pitch);
    jagged_cuda::Accumulator<1, kBlocks> sum = {};
    RoundedSum<kBlocks> rounded;
    // Two sets of fragments: one is loaded while the other is multiplied.
    uint32_t even[kStepK / 16][4], odd[kStepK / 16][4];
    const auto load = [&](uint32_t (&a)[kStepK / 16][4], int exist) {
      wait(exist);
#pragma unroll
      for (int k = 0; k < kStepK; k += 16) {
        lines.load(a[k / 16], position.stage * static_cast<uint32_t>(sizeof(shared.stages[0])), k,
                   exist);
      }
    };
    const auto multiply = [&](uint32_t (&a)[kStepK / 16][4], uint32_t (&next)[kStepK / 16][4],
                              int first) {
      const int exist = strip.depth - first;
      if (first > 0 && first % kSumDepth == 0) rounded.add(sum[0]);
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor y_rows = shared.stages[position.stage].sY.descriptor();
#pragma unroll
      for (int k = 0; k < kStepK; k += 16) {
        if (k > 0 && k >= exist) break;
        ptx::Wgmma<Element, true>::run(sum[0], a[k / 16], y_rows + YTile::row_step_bytes(k), true);
      }
      ptx::wgmma_commit_group();
      const int done = position.advance();
      if (exist > kStepK) load(next, exist - kStepK);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(sum[0]);
      release(done);
    };
    if (strip.depth > 0) load(even, strip.depth);
#pragma unroll 1
    for (int first = 0; first < strip.depth; first += 2 * kStepK) {
      multiply(even, odd, first);
      if (first + kStepK < strip.depth) multiply(odd, even, first + kStepK);
    }
    rounded.finish(sum[0]);
    const int lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    const float scale[2] = {1.0f, 1.0f};
    attention::store_quads(
        sum, scale,
        static_cast<Element*>(params.out) + (strip.out_row + row) * params.columns + column,
        params.columns, strip.rows - row,
        static_cast<int>(min(params.columns - column, int64_t{Config::kTileN})), lane);
  }

  __device__ __forceinline__ void run() {
    RingPosition<Config::kItems> place;
    for (;;) {
      shared.items.wait(place);
      MatrixStrip strip = shared.item[place.stage];
      __syncwarp();
      // The same in all lanes, as the compiler then sees: else it serialises the products.
      strip.depth = __shfl_sync(0xffffffffu, strip.depth, 0);
      strip.rows = __shfl_sync(0xffffffffu, strip.rows, 0);
      const int stage = place.advance();
      if (threadIdx.x % 32 == 0) shared.items.release(stage);
      if (strip.is_end) return;
      for (int column = 0; column < params.columns; column += Config::kTileN) {
        if (warp / 4 * 64 < strip.rows) {
          compute(strip, column);
        } else {
          skip(strip.depth);
        }
      }
    }
  }
};

// Zeros in the rows outside every sequence.
template <int kThreads, typename Element>
__device__ __forceinline__ void zero_rows_outside(const OffsetsView& rows, Element* global,
                                                  int64_t columns) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t begin = clamped_offset(rows, 0) * columns,
                end = clamped_offset(rows, rows.num_seqs) * columns;
  for (int64_t i = first; i < begin; i += step) global[i] = Element(0.0f);
  for (int64_t i = end + first; i < rows.total * columns; i += step) global[i] = Element(0.0f);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void array_jagged_bmm_jagged_out_stream(
    const __grid_constant__ ArrayStreamParams launch) {
  using Element = typename Config::Element;
  extern __shared__ __align__(1024) char array_stream_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<ArrayStreamStorage<Config>*>(array_stream_shared_bytes);
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(launch.y);
    ptx::prefetch_tensormap(launch.y_half);
    shared.ring.init(Config::kComputingWarps, 33 * Config::kProducers);
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
    zero_rows_outside<32 * Config::kComputingWarps>(Config::Strips::out_rows(params.matrices),
                                                    static_cast<Element*>(params.out),
                                                    params.columns);
    ArrayStreamConsumer<Config> consumer{shared, params, warp, {}};
    consumer.run();
  }
}

template <typename Config>
constexpr PathName kPath =
    PathName("cuda.array_jagged_bmm_jagged_out") + (Config::kTranspose ? ".transposed" : "") +
    ".wgmma.stream." + kElementName<typename Config::Element>;

template <typename Config>
cudaError_t launch_config(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  const MatricesView& matrices = params.matrices;
  const int64_t y_rows = Config::kTranspose ? matrices.rows.total : matrices.columns.total;
  ArrayStreamParams launch_params;
  launch_params.product = params;
  // A tensor without rows is never copied from, but its map must be valid.
  const TensorMapSource source{y_rows > 0 ? params.y : params.out,
                               params.type,
                               y_rows,
                               1,
                               params.columns,
                               params.y_stride,
                               0};
  cudaError_t error = encode_tensor_map(launch_params.y, source, Config::kStepK, Config::kBox);
  if (error == cudaSuccess) {
    error = encode_tensor_map(launch_params.y_half, source, Config::kStepK / 2, Config::kBox);
  }
  int device = 0, num_sms = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  return launch<array_jagged_bmm_jagged_out_stream<Config>>(
      launch_params, {num_sms}, Config::kThreads, sizeof(ArrayStreamStorage<Config>), stream,
      kPath<Config>);
}

template <typename Element, bool kTranspose>
cudaError_t launch_columns(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  if (params.columns <= 64)
    return launch_config<ArrayStreamConfig<Element, 64, kTranspose, 6>>(params, stream);
  if (params.columns <= 128)
    return launch_config<ArrayStreamConfig<Element, 128, kTranspose, 5>>(params, stream);
  return launch_config<ArrayStreamConfig<Element, 256, kTranspose, 4>>(params, stream);
}

template <typename Element>
cudaError_t launch_element(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_columns<Element, true>(params, stream)
                          : launch_columns<Element, false>(params, stream);
}

}  // namespace

cudaError_t launch_stream(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, stream)
                                           : launch_element<__half>(params, stream);
}

}  // namespace jagged_cuda::gemm
