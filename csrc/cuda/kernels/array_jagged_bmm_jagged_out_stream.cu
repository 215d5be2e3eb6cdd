#include "cuda/kernels/array_jagged_bmm_jagged_out.h"
#include "cuda/kernels/attention/epilogue.cuh"
#include "cuda/kernels/attention/wgmma_tile.cuh"
#include "cuda/kernels/gemm/shifted.cuh"
#include "cuda/kernels/gemm/stream.cuh"
#include "cuda/kernels/prim/element.cuh"
#include "cuda/kernels/prim/hopper.h"
#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/shared_scalar.cuh"
#include "cuda/kernels/prim/tma.cuh"

#include <type_traits>

#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef TILEMAX
#define TILEMAX 256
#endif
namespace jagged_cuda::gemm {
namespace {
#ifdef STAMP
__device__ long long g_stamps[2][132 * 4 * 12];
#define CLOCK(name) const long long name = clock64();
#define ADD(i, a, b) stamps[i] += (b) - (a);
#define COUNT(i, a) stamps[i] += (a);
#else
#define CLOCK(name)
#define ADD(i, a, b)
#define COUNT(i, a)
#endif

template <typename Element_, int kTileN_, bool kTranspose_>
struct ArrayStreamConfig {
  using Element = Element_;
  static constexpr bool kTranspose = kTranspose_;
#ifndef UNITM
#define UNITM 16
#endif
  static constexpr int kBlockM = 64, kTileN = kTileN_;
  static constexpr int kUnitM = UNITM;
  static constexpr int kGroups = GROUPS;     // computing warpgroups
  static constexpr int kProducers = 4;  // warps: one of A, the others of boxes of y
  static constexpr int kComputingWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * (kComputingWarps + kProducers);
  // Together all that kThreads have at the start.
  static constexpr int kProducerRegisters = 128, kConsumerRegisters = 184;
  static constexpr int kStepK = 32;
  static constexpr int kResident = 7;  // steps whose y stays for all blocks of a matrix
  static constexpr int kMaxLine = kResident * kStepK;
  static constexpr int kLineBytes = kMaxLine * 2 + 16;  // of lines that are copied one by one
  static constexpr int kSharedBanksBytes = 64;
  static constexpr int kYSlots = kTranspose ? (kTileN == 256 ? 7 : kTileN == 128 ? 9 : 11)
                                            : (kTileN == 256 ? 8 : 12);
  // A's lines: rows of a block, or, transposed, of a step.
  static constexpr int kLines = kTranspose ? kStepK : kBlockM;
  static constexpr int kASlots = kTranspose ? kYSlots : kTileN == 256 ? 3 : 4;
  // Columns of A in a line at once.
  static constexpr int kPiece = kTranspose ? kGroups * kBlockM : kMaxLine;
  static constexpr int kItems = 4;
};

// Blocks of the result's rows of one sequence, which share a tile of y.
struct ArrayItem {
  int64_t first;  // element of A: the first row, or, transposed, column of these
  int pitch;      // of A
  int depth;      // what is summed over
  int rows;
  int out_row, y_row;  // of the whole tensors
  int column;
  int group;  // the warpgroup of the first block; -1: there are no more items

  // Whether y, and A transposed, are loaded once for all blocks.
  template <typename Config>
  __device__ __forceinline__ bool resident() const {
    return depth <= Config::kMaxLine && (!Config::kTranspose || pitch <= Config::kMaxLine);
  }
  // Whether the lines of A come as one run.
  template <typename Config>
  __device__ __forceinline__ bool is_run() const {
    return resident<Config>() && pitch * 2 % Config::kSharedBanksBytes != 0;
  }
};

template <typename Config>
struct ArrayStorage {
  using Element = typename Config::Element;
  using YTile = WarpgroupTile<Element, Config::kStepK, Config::kTileN>;
  YTile sY[Config::kYSlots];
  alignas(128) char sA[Config::kASlots][Config::kLines * Config::kLineBytes];
  Ring<Config::kYSlots> y;
  Ring<Config::kASlots> a;  // not used if transposed
  Ring<Config::kItems> items;
  ArrayItem item[Config::kItems];
};

struct ArrayStreamParams {
  CUtensorMap y;  // boxes of kStepK rows and 64 columns
  ArrayJaggedBmmJaggedOutParams product;
};

// Elements [from, to) of a piece that begins at `first`, of which `origin` is the copy.
__device__ __noinline__ inline void copy_by_hand(char* origin, const char* first, const char* from,
                                                 const char* to) {
  for (; from < to; from += 2) {
    *reinterpret_cast<uint16_t*>(origin + (from - first)) =
        *reinterpret_cast<const uint16_t*>(from);
  }
}

// One piece of memory, as the chunks of 16 bytes that hold it.
struct Piece {
  const char *first, *last;  // bytes
  const char *low, *high;    // whole chunks within the tensor

  __device__ __forceinline__ Piece(const char* first_, int64_t bytes, const Extent& tensor)
      : first(first_), last(first_ + bytes) {
    low = first - reinterpret_cast<uintptr_t>(first) % 16;
    high = last + (16 - reinterpret_cast<uintptr_t>(last) % 16) % 16;
    if (low < tensor.begin) low += 16;
    if (high > tensor.end) high -= 16;
  }
  __device__ __forceinline__ int bulk_bytes() const {
    return high > low ? static_cast<int>(high - low) : 0;
  }
  // To `shared`, where the chunk of the first byte goes.
  __device__ __forceinline__ void copy(char* shared, uint64_t& full) const {
    char* origin = shared + reinterpret_cast<uintptr_t>(first) % 16;
    if (low > first) copy_by_hand(origin, first, first, low < last ? low : last);
    if (high > low) ptx::cp_async_bulk(origin + (low - first), low, bulk_bytes(), full);
    if (high < last && low < last) {
      copy_by_hand(origin, first, high > low ? high : low > first ? low : first, last);
    }
  }
};

template <typename Config>
__device__ __forceinline__ void produce(const ArrayStreamParams& launch,
                                        ArrayStorage<Config>& shared, int own) {
  using Element = typename Config::Element;
  using YTile = typename ArrayStorage<Config>::YTile;
  constexpr int kStepK = Config::kStepK, kBlockM = Config::kBlockM;
  constexpr bool kTranspose = Config::kTranspose;
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  const MatricesView& matrices = params.matrices;
  RingPosition<Config::kItems> item_place;
  RingPosition<Config::kYSlots> y_place;
  RingPosition<Config::kASlots> a_place;
  const int lane = threadIdx.x % 32;
  const char* gA = static_cast<const char*>(params.a);
  const Extent tensor{gA, gA + matrices.capacity * 2};
  int group = 0;
  const auto publish = [&](const ArrayItem& item, int first_group) {
    if (lane == 0) {
      shared.items.acquire(item_place);
      shared.item[item_place.stage] = item;
      shared.item[item_place.stage].group = first_group;
      shared.items.publish(item_place.stage);
    }
    item_place.advance();
  };
  // `lines` lines of `elems` elements of A to a slot; the whole warp.
  const auto copy_lines = [&](const ArrayItem& item, int64_t first, int lines, int elems, char* slot,
                              uint64_t& full) {
    const char* from = gA + first * 2;
    if (item.is_run<Config>()) {
      if (lane == 0) {
        const int64_t bytes = int64_t{lines - 1} * item.pitch * 2 + elems * 2;
        const Piece piece(from, bytes, tensor);
        piece.copy(slot, full);
        ptx::mbarrier_arrive_expect_tx(full, piece.bulk_bytes());  // behind what is copied by hand
      }
      return;
    }
    int bytes = 0;
    const auto for_lines = [&](auto take) {
#pragma unroll
      for (int step = 0; step < Config::kLines; step += 32) {
        const int line = step + lane;
        if (line < lines) {
          take(line, Piece(from + int64_t{line} * item.pitch * 2, elems * 2, tensor));
        }
      }
    };
    for_lines([&](int, const Piece& piece) { bytes += piece.bulk_bytes(); });
    bytes = __reduce_add_sync(0xffffffffu, bytes);
    for_lines([&](int line, const Piece& piece) {
      piece.copy(slot + line * Config::kLineBytes, full);
    });
    __syncwarp();  // what was copied by hand is there
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, bytes);
  };
  const OffsetsView& lines_view = kTranspose ? matrices.columns : matrices.rows;
  const int n_tiles = static_cast<int>((params.columns + Config::kTileN - 1) / Config::kTileN);
  const auto units_of = [&](const Matrix& matrix) {
    const int64_t len = kTranspose ? matrix.columns.len : matrix.rows.len;
    return Units{static_cast<int>((len + Config::kUnitM - 1) / Config::kUnitM), n_tiles};
  };
  walk_blocks(matrices, lines_view, 2 * params.columns, 1 << 20, units_of,
              [&](const BlockRange& whole) {
    const RowRange &out = kTranspose ? whole.columns : whole.rows,
                   &summed = kTranspose ? whole.rows : whole.columns;
    ArrayItem item;
    item.pitch = static_cast<int>(whole.columns.len);
    item.depth = whole.fits ? static_cast<int>(summed.len) : 0;
    item.y_row = static_cast<int>(summed.begin);
    item.column = whole.tile * Config::kTileN;
    const int end = min((whole.block + whole.count) * Config::kUnitM, static_cast<int>(out.len));
    const int most = item.resident<Config>() ? end : Config::kGroups * kBlockM;
    for (int row = whole.block * Config::kUnitM; row < end; row += most) {
      item.first = whole.begin + (kTranspose ? row : int64_t{row} * item.pitch);
      item.rows = min(most, end - row);
      const int count = (item.rows + kBlockM - 1) / kBlockM;
      item.out_row = static_cast<int>(out.begin) + row;
      const int steps = (item.depth + kStepK - 1) / kStepK;
      if (own == 0) {
        publish(item, group);
        group = (group + count) % Config::kGroups;
        if constexpr (kTranspose) {
          for (int step = 0; step < steps; ++step) {
            shared.y.acquire(y_place);
            const int lines = min(kStepK, item.depth - step * kStepK);
            copy_lines(item, item.first + int64_t{step} * kStepK * item.pitch, lines, item.rows,
                       shared.sA[y_place.stage], shared.y.full[y_place.stage]);
            y_place.advance();
          }
        } else {
          const int pieces = (item.depth + Config::kPiece - 1) / Config::kPiece;
          for (int piece = 0; piece < pieces; ++piece) {
            // Either is one.
            for (int block = 0; block < count; ++block) {
              shared.a.acquire(a_place);
              copy_lines(item,
                         item.first + int64_t{block} * kBlockM * item.pitch + piece * Config::kPiece,
                         min(kBlockM, item.rows - block * kBlockM),
                         min(Config::kPiece, item.depth - piece * Config::kPiece),
                         shared.sA[a_place.stage], shared.a.full[a_place.stage]);
              a_place.advance();
            }
          }
        }
      } else {
        if (lane == 0) {
          for (int step = 0; step < steps; ++step) {
            shared.y.acquire(y_place);
            uint64_t& full = shared.y.full[y_place.stage];
            constexpr int kBoxes = Config::kTileN / 64, kBoxBytes = 64 * kStepK * 2;
            const int boxes = (kBoxes - own + Config::kProducers - 1) / (Config::kProducers - 1);
            ptx::mbarrier_arrive_expect_tx(full, boxes * kBoxBytes);
            for (int box = own - 1; box < kBoxes; box += Config::kProducers - 1) {
              ptx::cp_async_bulk_tensor_3d(shared.sY[y_place.stage].data + box * 64 * kStepK,
                                           launch.y, item.column + box * 64, 0,
                                           item.y_row + step * kStepK, full);
            }
            y_place.advance();
          }
        }
        __syncwarp();
      }
    }
  });
  if (own == 0) publish(ArrayItem{}, -1);
}

template <typename Config>
struct ArrayConsumer {
  using Element = typename Config::Element;
  using Storage = ArrayStorage<Config>;
  using YTile = typename Storage::YTile;
  static constexpr bool kTranspose = Config::kTranspose;
  static constexpr int kStepK = Config::kStepK, kBlocks = Config::kTileN / 8;

  Storage& shared;
  const ArrayJaggedBmmJaggedOutParams& params;
  const int warp, group;
#ifdef STAMP
  long long stamps[12] = {};
#endif

  // Where this lane's elements of a slot's first fragment lie: of two rows, or, transposed, of two
  // elements of K.
  struct Lanes {
    uint32_t address[2];
    uint32_t shift[2];
    uint32_t line_bytes;
  };

  __device__ __forceinline__ Lanes lanes_of(const ArrayItem& item, int block) const {
    const int lane = threadIdx.x % 32, row = warp % 4 * 16 + lane / 4, k = lane % 4 * 2;
    const bool is_run = item.is_run<Config>();
    const int64_t first =
        kTranspose ? item.first : item.first + int64_t{block} * Config::kBlockM * item.pitch;
    // Only the address within a chunk counts.
    const auto base = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(params.a)) +
                      static_cast<uint32_t>(first) * 2;
    Lanes lanes;
    lanes.line_bytes = is_run ? item.pitch * 2 : Config::kLineBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int line = kTranspose ? k + i : row + 8 * i;
      const uint32_t phase = (base + (is_run ? 0 : line * static_cast<uint32_t>(item.pitch) * 2)) % 16;
      const uint32_t byte = line * lanes.line_bytes + phase;
      if constexpr (kTranspose) {
        lanes.address[i] = byte + (block * Config::kBlockM + row) * 2;
      } else {
        lanes.address[i] = byte / 4 * 4 + k * 2;
        lanes.shift[i] = byte % 4 * 8;
      }
    }
    return lanes;
  }

  // The fragment from `k` on of the slot at `shared_slot`, zeros from `exist` on.
  __device__ __forceinline__ static void load(uint32_t (&a)[4], const Lanes& lanes,
                                              uint32_t slot, int k, int exist) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2 * 8;  // along K
      if constexpr (kTranspose) {
        const uint32_t offset = slot + (k + half) * lanes.line_bytes + i % 2 * 16;
        a[i] = ptx::ld_shared_2(lanes.address[0] + offset) |
               ptx::ld_shared_2(lanes.address[1] + offset) << 16;
      } else {
        const uint32_t address = slot + lanes.address[i % 2] + (k + half) * 2;
        a[i] = __funnelshift_r(ptx::ld_shared_4(address), ptx::ld_shared_4(address + 4),
                               lanes.shift[i % 2]);
      }
    }
    if (k + 16 > exist) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int left = exist - (k + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2);
        a[i] = left >= 2 ? a[i] : left == 1 ? a[i] & 0xffffu : 0;
      }
    }
  }

  // Rows of y behind the last one, which belong to another sequence: 0 times NaN is NaN.
  __device__ __forceinline__ void clear_rows(YTile& sY, int exist) const {
    const int end = min((exist + 15) / 16 * 16, kStepK);
    for (int i = threadIdx.x % 128; i < (end - exist) * YTile::kChunks; i += 128) {
      *reinterpret_cast<uint4*>(sY.chunk(exist + i / YTile::kChunks, i % YTile::kChunks)) =
          make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + group, 128);
  }

  __device__ __forceinline__ void compute(const ArrayItem& item, int block,
                                          Place<Config::kASlots> a_place, int a_stride,
                                          Place<Config::kYSlots> y_place, bool is_first,
                                          bool is_last) {
    jagged_cuda::Accumulator<1, kBlocks> sum = {};
    RoundedSum<kBlocks> rounded;
    const Lanes lanes = lanes_of(item, block);
    const int steps = (item.depth + kStepK - 1) / kStepK;
    uint32_t slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int exist = item.depth - step * kStepK;
      if (step > 0 && step % (kSumDepth / kStepK) == 0) rounded.add(sum[0]);
      CLOCK(a0)
      if constexpr (!kTranspose) {
        if (step % Config::kResident == 0) {
          ptx::mbarrier_wait(shared.a.full[a_place.slot], a_place.parity);
          slot = ptx::shared_address(shared.sA[a_place.slot]);
        }
      }
      CLOCK(a1)
      ptx::mbarrier_wait(shared.y.full[y_place.slot], y_place.parity);
      CLOCK(a2)
      if constexpr (kTranspose) slot = ptx::shared_address(shared.sA[y_place.slot]);
      YTile& sY = shared.sY[y_place.slot];
      if (exist < kStepK && is_first) clear_rows(sY, exist);
      const int in_slot = kTranspose ? 0 : step % Config::kResident * kStepK;
      uint32_t a[kStepK / 16][4];
#pragma unroll
      for (int k = 0; k < kStepK; k += 16) {
        load(a[k / 16], lanes, slot + in_slot * 2, k, exist);
      }
      ptx::wgmma_fence();
      const ptx::MatrixDescriptor y_rows = sY.descriptor();
#pragma unroll
      for (int k = 0; k < kStepK; k += 16) {
        if (k > 0 && k >= exist) break;
        ptx::Wgmma<Element, true>::run(sum[0], a[k / 16], y_rows + YTile::row_step_bytes(k), true);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(sum[0]);
      CLOCK(a3)
      ADD(0, a0, a1) ADD(1, a1, a2) ADD(2, a2, a3)
      if (threadIdx.x % 32 == 0 && is_last) shared.y.release(y_place.slot);
      y_place.advance(1);
      if constexpr (!kTranspose) {
        if (step % Config::kResident == Config::kResident - 1 || step + 1 == steps) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) shared.a.release(a_place.slot);
          a_place.advance(a_stride);
        }
      }
    }
    rounded.finish(sum[0]);
    CLOCK(a4)
    const int lane = threadIdx.x % 32, row = block * Config::kBlockM + warp % 4 * 16 + lane / 4;
    const float scale[2] = {1.0f, 1.0f};
    attention::store_quads(sum, scale,
                           static_cast<Element*>(params.out) +
                               (int64_t{item.out_row} + row) * params.columns + item.column,
                           params.columns, item.rows - row,
                           static_cast<int>(min(params.columns - item.column,
                                                int64_t{Config::kTileN})),
                           lane);
    CLOCK(a5)
    ADD(3, a4, a5) COUNT(4, 1)
  }

  __device__ __forceinline__ void run() {
    CLOCK(b0)
    RingPosition<Config::kItems> place;
    Place<Config::kASlots> a_place;
    Place<Config::kYSlots> y_place;
    for (;;) {
      CLOCK(b1)
      shared.items.wait(place);
      CLOCK(b2)
      ADD(5, b1, b2)
      const ArrayItem item = shared.item[place.stage];
      __syncwarp();
      const int stage = place.advance();
      if (threadIdx.x % 32 == 0) shared.items.release(stage);
      if (item.group < 0) break;
      COUNT(7, 1) COUNT(8, item.rows) COUNT(9, (long long)item.rows * item.pitch)
      const int blocks = (item.rows + Config::kBlockM - 1) / Config::kBlockM;
      const int own = (group + Config::kGroups - item.group) % Config::kGroups;
      const int steps = (item.depth + kStepK - 1) / kStepK;
      const int pieces = (item.depth + Config::kPiece - 1) / Config::kPiece;
      if (own >= blocks) {
        Place<Config::kYSlots> skipped = y_place;
        for (int step = 0; step < steps; ++step) {
          ptx::mbarrier_wait(shared.y.full[skipped.slot], skipped.parity);
          if (threadIdx.x % 32 == 0) shared.y.release(skipped.slot);
          skipped.advance(1);
        }
      }
#pragma unroll 1
      for (int block = own; block < blocks; block += Config::kGroups) {
        // Of several pieces there are those of all blocks, one after another.
        Place<Config::kASlots> at = a_place;
        at.advance(block);
        compute(item, block, at, blocks, y_place, block == own, block + Config::kGroups >= blocks);
      }
      if constexpr (!kTranspose) a_place.advance(blocks * pieces);
      y_place.advance(steps);
    }
    CLOCK(b3)
    ADD(6, b0, b3)
#ifdef STAMP
    if (threadIdx.x % 128 == 0) for (int i = 0; i < 12; ++i) g_stamps[kTranspose][(blockIdx.x * 4 + group) * 12 + i] = stamps[i];
#endif
  }
};

// Zeros in the rows outside all sequences, by the first kThreads threads of every CTA.
template <int kThreads>
__device__ __forceinline__ void zero_rows_outside(const OffsetsView& lines, void* out,
                                                  int64_t row_chunks) {
  const int64_t begin = clamped_offset(lines, 0) * row_chunks,
                end = clamped_offset(lines, lines.num_seqs) * row_chunks,
                all = lines.total * row_chunks;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint4* chunks = static_cast<uint4*>(out);
  for (int64_t i = first; i < begin; i += step) chunks[i] = make_uint4(0, 0, 0, 0);
  for (int64_t i = end + first; i < all; i += step) chunks[i] = make_uint4(0, 0, 0, 0);
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, 1) void array_jagged_bmm_jagged_out_stream(
    const __grid_constant__ ArrayStreamParams launch) {
  extern __shared__ __align__(1024) char array_stream_shared_bytes[];
  if (!ptx::kIsSm90a) return;
  auto& shared = *reinterpret_cast<ArrayStorage<Config>*>(array_stream_shared_bytes);
  const ArrayJaggedBmmJaggedOutParams& params = launch.product;
  if (threadIdx.x == 0) {
    shared.y.init(Config::kComputingWarps,
                  Config::kTranspose ? Config::kProducers : Config::kProducers - 1);
    shared.a.init(4);
    shared.items.init(Config::kComputingWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised
  // The same in all lanes, as the compiler then sees.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= Config::kComputingWarps) {
    if constexpr (Config::kGroups == 2) ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    produce<Config>(launch, shared, warp - Config::kComputingWarps);
  } else {
    if constexpr (Config::kGroups == 2) ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    zero_rows_outside<Config::kComputingWarps * 32>(
        Config::kTranspose ? params.matrices.columns : params.matrices.rows, params.out,
        params.columns / 8);
    ArrayConsumer<Config>{shared, params, warp, warp / 4}.run();
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
  cudaError_t error = encode_tensor_map(launch_params.y, source, Config::kStepK, 64);
  int device = 0, num_sms = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  return launch<array_jagged_bmm_jagged_out_stream<Config>>(
      launch_params, {num_sms}, Config::kThreads, sizeof(ArrayStorage<Config>), stream,
      kPath<Config>);
}

template <typename Element, bool kTranspose>
cudaError_t launch_columns(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  if (params.columns <= 64)
    return launch_config<ArrayStreamConfig<Element, 64, kTranspose>>(params, stream);
  if (params.columns <= 128 || TILEMAX == 128)
    return launch_config<ArrayStreamConfig<Element, 128, kTranspose>>(params, stream);
  if constexpr (TILEMAX == 256)
    return launch_config<ArrayStreamConfig<Element, 256, kTranspose>>(params, stream);
  return cudaErrorNotSupported;
}

template <typename Element>
cudaError_t launch_element(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.transpose ? launch_columns<Element, true>(params, stream)
                          : launch_columns<Element, false>(params, stream);
}

}  // namespace

#ifdef STAMP
void read_stamps(void* to, int i) { cudaMemcpyFromSymbol(to, g_stamps, sizeof(g_stamps) / 2, i * sizeof(g_stamps) / 2); }
#endif
cudaError_t launch_array_stream(const ArrayJaggedBmmJaggedOutParams& params, cudaStream_t stream) {
  return params.type == ElementType::kBf16 ? launch_element<__nv_bfloat16>(params, stream)
                                           : launch_element<__half>(params, stream);
}

}  // namespace jagged_cuda::gemm
