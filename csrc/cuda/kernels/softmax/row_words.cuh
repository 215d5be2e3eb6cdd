// jagged2_softmax over the columns of each row, by words of 4 bytes in registers
// (softmax/lines.cuh: the mathematics; softmax/words.cuh).
//
// Grid: as many CTAs as the GPU holds, or a few times as many. Each warp takes an equal share of the
// vector's elements: the rows that begin there, of one matrix after another (shares.cuh). Who computes a
// row follows from its length:
//   - up to kMaxWords: a few lanes of the warp, which keep it in registers (short_rows.cuh)
//   - up to kMaxWarpWords: the warp, which reads it three times, backward twice (row_of_warp.cuh)
//   - longer: the whole CTA, at the end (long_lines.cuh)
//
// *Staged* (compute capability 9.0), a warp's share is brought to its own shared memory by one bulk copy,
// which starts before the warp knows its matrices; shares are then as small as fits. A row longer than
// kMaxWords that ends too far behind the share is brought by a copy of its own. Shorter ones, and those
// in chunks that are not whole at the vector's ends, are then read as they lie.
//
// Shared memory: the warps' shares; long_lines.cuh works where these were.
// Barriers: whether any row is left to the CTA; those of long_lines.cuh; `arrived` of each warp, on which
// its copy completes.
//
// Elements outside every matrix, and those of one that does not fit, become zeros.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/softmax/row_of_warp.cuh"
#include "cuda/kernels/softmax/shares.cuh"
#include "cuda/kernels/softmax/short_rows.cuh"

#include <algorithm>

namespace jagged_cuda::softmax {

template <typename Element_, bool kBackward_, bool kStaged_ = false>
struct RowWordsConfig {
  using Element = Element_;
  static constexpr bool kBackward = kBackward_, kStaged = kStaged_;
  static_assert(!kStaged || !kBackward);
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtas = 6;  // per SM: 80 registers
  // Of a row that lanes keep: 32 lanes with 12 words, or forward 24 of floats
  static constexpr int kMaxWords = sizeof(Element) == 2 || kBackward ? 384 : 768;
  // Of a row that one warp takes: a lane then adds at most 1,022 exponentials as integers. Each is off
  // by up to 2^-23, all of them to one side if they are alike, which f16 bears of 8,192.
  static constexpr int kMaxWarpWords =
      std::is_same_v<Element, __half> && !kBackward ? 4'096 : 16'320;
  static constexpr int kMinElems = 512;      // of a warp's share
  static constexpr int kWaveElems = 10'000;  // about as many, if there are more in 16 bits
  // Staged, of a warp; six CTAs have 37,888 bytes each. What is copied behind a share whose last row
  // is not known yet
  static constexpr int kStageBytes = 9'344, kBehind = 256;
  static constexpr int kStage = kStageBytes / static_cast<int>(sizeof(Element));
  // What long_lines.cuh wants to know
  static constexpr bool kByWindows = false;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kItems = 16;
  static constexpr int kMaxShort = 32 * kItems;
  static constexpr int kLineSets = 1;
};

// What a share of the vector has of one matrix.
struct PartOfShare {
  int64_t begin;  // the first element of the first row that begins in the share
  int64_t rows;   // 0: none
  int64_t columns;
  int64_t next;                    // where the next matrix begins
  int64_t zeros_begin, zeros_end;  // elements of a matrix that does not fit, or of none
};

// What [low, high) has of matrix `seq`; seq -1 is what lies before all matrices, seq B what lies
// behind them.
__device__ __forceinline__ PartOfShare part_of_share(const MatricesView& matrices, int64_t seq,
                                                     int64_t low, int64_t high) {
  const int64_t num_seqs = matrices.rows.num_seqs;
  const auto* gOffsets = reinterpret_cast<const long long*>(matrices.offsets);
  PartOfShare part{0, 0, 0, matrices.capacity, 0, 0};
  if (seq > num_seqs) return part;
  Matrix matrix{};
  if (seq >= 0 && seq < num_seqs) matrix = find_matrix(matrices, seq);
  if (seq < num_seqs) part.next = __ldg(gOffsets + seq + 1);
  if (!matrix.fits) {
    const int64_t begin = seq >= 0 ? __ldg(gOffsets + seq) : 0;
    part.zeros_begin = begin > low ? begin : low;
    part.zeros_end = part.next < high ? part.next : high;
    return part;
  }
  const int64_t rows = matrix.rows.len, columns = matrix.columns.len, elems = rows * columns;
  if (elems == 0 || matrix.begin >= high || matrix.begin + elems <= low) return part;
  const int64_t before = low - matrix.begin, until = high - matrix.begin;
  const int64_t first = before > 0 ? divide_up(before, columns) : 0;
  const int64_t end = until < elems ? divide_up(until, columns) : rows;
  part.begin = matrix.begin + first * columns;
  part.rows = end - first;
  part.columns = columns;
  return part;
}

// A warp's share, and what its last row may need behind it, in its shared memory.
template <typename Config>
struct ShareOnStage {
  using Element = typename Config::Element;
  const Element* sX = nullptr;
  int64_t begin = 0, end = 0;
  uint64_t* arrived = nullptr;  // null: nothing was copied
  int parity = 0;
  bool waited = false;

  __device__ __forceinline__ void load(const Element* gX, int64_t low, int64_t share,
                                       int64_t capacity) {
    if constexpr (Config::kStaged) {
      extern __shared__ __align__(16) unsigned char dynamic_shared[];
      __shared__ alignas(8) uint64_t all_arrived[Config::kWarps];
      unsigned char* sShare = dynamic_shared + threadIdx.x / 32 * Config::kStageBytes;
      sX = reinterpret_cast<const Element*>(sShare);
      if (low >= capacity) return;
      // Whole chunks of the vector
      begin = low - static_cast<int64_t>(reinterpret_cast<uintptr_t>(gX + low) / sizeof(Element) %
                                         Config::kChunk);
      if (begin < 0) begin += Config::kChunk;
      const int64_t last = low + share + Config::kBehind;
      const int elems = static_cast<int>((last < capacity ? last : capacity) - begin);
      const int bytes = elems / Config::kChunk * 16;
      end = begin + bytes / static_cast<int>(sizeof(Element));
      if (bytes <= 0) return;
      arrived = &all_arrived[threadIdx.x / 32];
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_init(*arrived, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(*arrived, bytes);
        ptx::cp_async_bulk(sShare, gX + begin, bytes, *arrived);
      }
      __syncwarp();  // the barrier is there
    }
  }
  __device__ __forceinline__ void wait() {
    if (Config::kStaged && arrived != nullptr && !waited) {
      ptx::mbarrier_wait(*arrived, parity);
      parity ^= 1;
      waited = true;
    }
  }
  // Where `count` elements from `first` on lie.
  __device__ __forceinline__ const Element* find(const Element* gX, int64_t first,
                                                 int64_t count) const {
    return Config::kStaged && first >= begin && first + count <= end ? sX + (first - begin)
                                                                     : gX + first;
  }
  // The same of a row that is read more than once: if it ends behind what was copied, it takes that
  // one's place, which no row behind it needs. Where it can't, it is read as it lies.
  __device__ __forceinline__ const Element* bring(const Element* gX, int64_t first, int count,
                                                  int64_t capacity) {
    if constexpr (Config::kStaged) {
      constexpr int kBytes = static_cast<int>(sizeof(Element));
      const int before =
          static_cast<int>(reinterpret_cast<uintptr_t>(gX + first) / kBytes % Config::kChunk);
      const int elems = divide_up(before + count, Config::kChunk) * Config::kChunk;
      const int64_t from = first - before;
      if ((first < begin || first + count > end) && arrived != nullptr && elems <= Config::kStage &&
          from >= 0 && from + elems <= capacity) {
        __syncwarp();  // all lanes have read what lies there
        if (threadIdx.x % 32 == 0) {
          ptx::mbarrier_arrive_expect_tx(*arrived, elems * kBytes);
          ptx::cp_async_bulk(const_cast<Element*>(sX), gX + from, elems * kBytes, *arrived);
        }
        begin = from;
        end = from + elems;
        waited = false;
        wait();
      }
    }
    return find(gX, first, count);
  }
};

template <typename Params>
struct RowWordsLaunch {
  Params params;
  int64_t share;  // elements of a warp
};

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, Config::kCtas) void row_words_kernel(
    const __grid_constant__ RowWordsLaunch<Params> launch) {
  using Operand = Operands<Params>;
  using Element = typename Config::Element;
  const Params& params = launch.params;
  const MatricesView& matrices = params.matrices;
  const int lane = threadIdx.x % 32;
  const Element* gX = static_cast<const Element*>(Operand::x(params));
  const Element* gGrad = static_cast<const Element*>(Operand::grad(params));
  Element* gOut = static_cast<Element*>(Operand::result(params));
  const float scale = factor_of(params);
  const int64_t first = int64_t{blockIdx.x} * Config::kWarps * launch.share;
  const int64_t low = first + threadIdx.x / 32 * launch.share;
  ShareOnStage<Config> stage;
  stage.load(gX, low, launch.share, matrices.capacity);

  // A pass over the share's matrices, 32 at a time; `long_ones` are computed by the CTA.
  bool any_long = false;
  const auto take_share = [&](int64_t low, int64_t high, bool long_ones) {
    if (high > matrices.capacity) high = matrices.capacity;
    if (low >= high) return;
#pragma unroll 1
    for (int64_t seq = last_matrix_before(matrices, low);; seq += 32) {
      const PartOfShare part = part_of_share(matrices, seq + lane, low, high);
      unsigned zeros = __ballot_sync(kAllLanes, part.zeros_begin < part.zeros_end && !long_ones);
#pragma unroll 1
      for (; zeros != 0; zeros &= zeros - 1) {
        const int owner = __ffs(static_cast<int>(zeros)) - 1;
        const int64_t begin = __shfl_sync(kAllLanes, part.zeros_begin, owner);
        const int64_t end = __shfl_sync(kAllLanes, part.zeros_end, owner);
        store_zeros(gOut + begin, end - begin, lane, 32);
      }
      const bool is_long = part.columns > int64_t{Config::kMaxWarpWords} * kPerWord<Element>;
      any_long |= is_long;
      unsigned left = __ballot_sync(kAllLanes, part.rows > 0 && is_long == long_ones);
      stage.wait();
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int owner = __ffs(static_cast<int>(left)) - 1;
        const int64_t begin = __shfl_sync(kAllLanes, part.begin, owner);
        const int64_t rows = __shfl_sync(kAllLanes, part.rows, owner);
        const int64_t columns = __shfl_sync(kAllLanes, part.columns, owner);
        if (long_ones) {
          softmax_long_lines<Config>(
              Place<Element, int64_t>{gX + begin, gGrad + begin, gOut + begin, 1.0f}, false, 0,
              static_cast<int>(rows), columns, columns, 1, 5, Scale<float>{scale});
        } else if (columns > Config::kMaxWords * kPerWord<Element>) {
#pragma unroll 1
          for (int64_t row = begin; row < begin + rows * columns; row += columns) {
            softmax_row_by_warp<Config>(
                stage.bring(gX, row, static_cast<int>(columns), matrices.capacity), gGrad + row,
                gOut + row, static_cast<int>(columns), scale);
          }
        } else {
          softmax_short_rows_by_words<Config>(stage.find(gX, begin, rows * columns), gGrad + begin,
                                              gOut + begin, static_cast<int>(rows),
                                              static_cast<int>(columns), scale);
        }
      }
      if (__any_sync(kAllLanes, seq + lane >= matrices.rows.num_seqs || part.next >= high)) break;
    }
  };
  take_share(low, low + launch.share, false);
  if (__syncthreads_or(any_long)) take_share(first, first + Config::kWarps * launch.share, true);
}

template <typename Config, typename Params>
cudaError_t launch_row_words_of(const Params& params, int64_t share, cudaStream_t stream) {
  constexpr const char* kPath = Config::kBackward ? "cuda.jagged2_softmax_backward.columns.words"
                                : Config::kStaged ? "cuda.jagged2_softmax.columns.staged_words"
                                                  : "cuda.jagged2_softmax.columns.words";
  constexpr int kLongBytes = SpanShared<Config>::bytes(Config::kChunk);
  constexpr int kBytes = Config::kStaged ? Config::kWarps * Config::kStageBytes : kLongBytes;
  static_assert(kBytes >= kLongBytes);
  const int64_t of_cta = share * Config::kWarps;
  return launch<row_words_kernel<Config, Params>>(
      RowWordsLaunch<Params>{params, share}, {(params.matrices.capacity + of_cta - 1) / of_cta},
      Config::kThreads, kBytes, stream, kPath);
}

// Whether staged shares are the faster where not all fit the SMs at a time, by the elements of a mean
// matrix: those of 128 to 300 columns, and those of rows that a warp would read three times as they lie,
// if they fit its stage. The bits are the same.
template <typename Params>
bool fits_staged_waves(const Params& params) {
  const int64_t mean =
      params.matrices.capacity / std::max<int64_t>(1, params.matrices.rows.num_seqs);
  return (mean >= 12'000 && mean <= 100'000) || (mean >= 600'000 && mean <= 20'000'000);
}

template <typename Element, typename Params>
cudaError_t launch_row_words(const Params& params, cudaStream_t stream) {
  constexpr bool kBackward = Operands<Params>::kBackward;
  using Config = RowWordsConfig<Element, kBackward>;
  int device = 0, num_sms = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  const int64_t warps = int64_t{num_sms} * Config::kCtas * Config::kWarps;
  // Equal shares of so many waves of CTAs
  const auto share_of = [&](int64_t waves) {
    const int64_t all = warps * waves;
    return std::max<int64_t>(Config::kMinElems, (params.matrices.capacity + all - 1) / all);
  };
  if constexpr (!kBackward && sizeof(Element) == 2) {
    using Staged = RowWordsConfig<Element, false, true>;
    constexpr int64_t kMost = Staged::kStage - Staged::kBehind - Staged::kChunk;
    const int64_t waves = (share_of(1) + kMost - 1) / kMost;
    if (has_wgmma() && (waves == 1 || fits_staged_waves(params))) {
      return launch_row_words_of<Staged>(params, share_of(waves), stream);
    }
  }
  // Large batches in several waves: a warp whose share has long rows takes longer than others.
  const int64_t waves = (share_of(1) + Config::kWaveElems / 2) / Config::kWaveElems;
  const int64_t share = share_of(sizeof(Element) == 2 && waves > 1 ? waves : 1);
  return launch_row_words_of<Config>(params, share, stream);
}

}  // namespace jagged_cuda::softmax
