// jagged2_softmax over the rows of each column, backward, 16-bit elements: whole matrices in shared
// memory, one after another as a ring holds them (softmax/lines.cuh: the mathematics).
//
// A matrix is one piece of memory. Cut into chunks of 16 bytes, 8 rows of C columns are C chunks,
// wherever a row begins: chunks k and k + C hold the same columns. So there are neither strips nor
// ragged rows, only the first and the last chunk may hold elements of others. A chunk that the vector's end
// cuts is read by its elements.
//
// Grid: x, a CTA per SM, which takes an equal share of the vector's elements: the matrices that begin
// there, the largest of each 32 first. One warp copies them to the ring, as far ahead as they fit; two
// groups of 416 threads compute them, each the next one that no other has taken; one lane stores the
// results from where they lie. Of a matrix `abreast` C threads each have every abreast C-th chunk:
//
//   sum of p dp of each of 8 columns -> added by a thread for each column, in a fixed order
//   scale p (dp - sum), in place of p
//
// In the end all threads compute by spans (softmax/spans.cuh) what is too large for that: those parts
// of such matrices that are the CTA's by how much of them its share has. Elements outside every matrix,
// and those of one that does not fit the vector, become zeros.
//
// Shared memory: the ring; for each group the sums of each thread's 8 columns; the matrices in the ring.
// Barriers: of each slot `full`, p and dp of its matrix are there; `done`, its result is; `empty`, the
// result has been read and the place is free; of each group one between the steps of a matrix.
#pragma once

#include "cuda/kernels/prim/launch.cuh"
#include "cuda/kernels/prim/tma.cuh"
#include "cuda/kernels/prim/wgmma.cuh"
#include "cuda/kernels/softmax/row_words.cuh"
#include "cuda/kernels/softmax/spans.cuh"
#include "cuda/kernels/softmax/words.cuh"

namespace jagged_cuda::softmax {

template <typename Element_>
struct MatrixRingConfig {
  using Element = Element_;
  static_assert(sizeof(Element) == 2);
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kGroups = 2, kGroupThreads = 416;  // twice 200 columns, and a few more
  static constexpr int kConsumers = kGroups * kGroupThreads;
  static constexpr int kThreads = kConsumers + 64;
  static constexpr int kSlots = 32;
  static constexpr int kBytes = 227 << 10;  // all that a CTA can have
  using Spans = SpanConfig<Element, true, false, kThreads>;
};

// A matrix in the ring.
struct RingItem {
  int64_t begin;  // element at which its first chunk begins
  int elems;      // from there to its end; -1: there is no further one
  int head;       // of these, before the matrix
  int columns;
  int abreast;  // threads for each chunk of C
  int place;    // of its first chunk; that of dp is `chunks` behind
  int chunks;
};

template <typename Config>
struct RingShared {
  uint64_t full[Config::kSlots], done[Config::kSlots], empty[Config::kSlots];
  RingItem items[Config::kSlots];
  int next, taken[Config::kGroups][2];
  int any_rest;  // spans are to be computed
  alignas(16) float sum[Config::kGroups][Config::kGroupThreads * Config::kChunk];

  static constexpr int kRing = (Config::kBytes - static_cast<int>(sizeof(uint4)) * 1'900) / 16;
};

template <typename Params>
struct RingLaunch {
  SpanLaunch<Params> spans;
  int64_t share;  // elements of a CTA
};

// What a share has of matrix `seq`; -1 and B are what lies before and behind all.
struct RingPart {
  Matrix matrix;
  bool in_ring;   // the matrix begins in the share and is small
  bool is_large;  // a part of it is the share's
  int64_t zeros_begin, zeros_end;

  __device__ __forceinline__ bool is_rest() const { return is_large || zeros_begin < zeros_end; }
};

template <typename Config>
__device__ __forceinline__ RingPart ring_part(const MatricesView& matrices, int64_t seq,
                                              int64_t low, int64_t high) {
  RingPart part{};
  const PartOfShare of_share = part_of_share(matrices, seq, low, high);
  part.zeros_begin = of_share.zeros_begin;
  part.zeros_end = of_share.zeros_end;
  if (seq < 0 || seq >= matrices.rows.num_seqs) return part;
  part.matrix = find_matrix(matrices, seq);
  const int64_t rows = part.matrix.rows.len, columns = part.matrix.columns.len;
  if (!part.matrix.fits || rows == 0 || columns == 0) return part;
  const int64_t begin = part.matrix.begin, elems = rows * columns;
  // Both operands, with what else their end chunks hold
  constexpr int64_t kMost = RingShared<Config>::kRing / 2 * Config::kChunk - 2 * Config::kChunk;
  if (columns <= Config::kGroupThreads && elems <= kMost) {
    part.in_ring = begin >= low && begin < high;
  } else {
    part.is_large = begin < high && begin + elems > low;
  }
  return part;
}

// Copies the share's small matrices to the ring. A whole warp.
template <typename Config, typename Element>
__device__ __forceinline__ void load_ring(const MatricesView& matrices, const Element* gP,
                                          const Element* gGrad, int64_t low, int64_t high,
                                          uint4* sRing, RingShared<Config>& shared) {
  constexpr int kSlots = Config::kSlots, kChunk = Config::kChunk;
  constexpr uint32_t kRing = RingShared<Config>::kRing;
  const int lane = threadIdx.x % 32;
  int index = 0, tail = 0;      // of the next one; of the oldest one in the ring
  uint32_t end = 0, begin = 0;  // where these begin, in chunks, counted on from turn to turn
  const auto make_room = [&](uint32_t chunks) {
    if (end % kRing + chunks > kRing) end += kRing - end % kRing;
    while (index - tail >= kSlots || (tail < index && end + chunks - begin > kRing)) {
      ptx::mbarrier_wait(shared.empty[tail % kSlots], (tail / kSlots) & 1);
      ++tail;
      if (tail < index) {
        const uint32_t place = shared.items[tail % kSlots].place;
        begin += (place + kRing - begin % kRing) % kRing;
      }
    }
    if (tail == index) begin = end;
  };
  bool any_rest = false;
#pragma unroll 1
  for (int64_t seq = last_matrix_before(matrices, low);; seq += 32) {
    const RingPart part = ring_part<Config>(matrices, seq + lane, low, high);
    any_rest |= part.is_rest();
    const auto columns = static_cast<int>(part.matrix.columns.len);
    const int elems = part.in_ring ? static_cast<int>(part.matrix.rows.len) * columns : 0;
#pragma unroll 1
    for (unsigned left = elems;;) {
      const unsigned largest = __reduce_max_sync(kAllLanes, left << 5 | lane);
      if (largest < 32) break;
      const int owner = largest % 32;
      if (lane == owner) left = 0;
      const int64_t first = __shfl_sync(kAllLanes, part.matrix.begin, owner);
      const auto address = reinterpret_cast<uintptr_t>(gP + first) / sizeof(Element);
      RingItem item;
      item.columns = __shfl_sync(kAllLanes, columns, owner);
      item.head = static_cast<int>(address % kChunk);
      item.begin = first - item.head;
      item.elems = __shfl_sync(kAllLanes, elems, owner) + item.head;
      item.chunks = (item.elems + kChunk - 1) / kChunk;
      const int most = Config::kGroupThreads / item.columns,
                all = divide_up(item.chunks, item.columns);
      item.abreast = all < most ? all : most;
      make_room(2 * item.chunks);
      item.place = static_cast<int>(end % kRing);
      const int slot = index % kSlots;
      if (lane == 0) {
        shared.items[slot] = item;
        uint64_t& full = shared.full[slot];
        const int64_t whole = (matrices.capacity - item.begin) / kChunk;
        const int bytes = 16 * (whole < item.chunks ? static_cast<int>(whole) : item.chunks);
        ptx::mbarrier_arrive_expect_tx(full, 2 * bytes);
        if (bytes > 0) {
          ptx::cp_async_bulk(sRing + item.place, gP + item.begin, bytes, full);
          ptx::cp_async_bulk(sRing + item.place + item.chunks, gGrad + item.begin, bytes, full);
        }
      }
      __syncwarp();
      end += 2 * item.chunks;
      ++index;
    }
    const bool last =
        seq + lane >= matrices.rows.num_seqs ||
        __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq + lane + 1) >= high;
    if (__any_sync(kAllLanes, last)) break;
  }
  if (__any_sync(kAllLanes, any_rest) && lane == 0) shared.any_rest = 1;
#pragma unroll 1
  for (int group = 0; group < Config::kGroups; ++group, ++index) {
    make_room(0);
    if (lane == 0) {
      shared.items[index % kSlots].elems = -1;
      shared.items[index % kSlots].place = static_cast<int>(end % kRing);
      ptx::mbarrier_arrive(shared.full[index % kSlots]);
    }
    __syncwarp();
  }
}

// Stores the results, one thread.
template <typename Config, typename Element>
__device__ __forceinline__ void store_ring(Element* gOut, const uint4* sRing,
                                           RingShared<Config>& shared) {
  constexpr int kSlots = Config::kSlots, kChunk = Config::kChunk;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const int slot = index % kSlots, parity = (index / kSlots) & 1;
    ptx::mbarrier_wait(shared.full[slot], parity);
    const RingItem& item = shared.items[slot];
    if (item.elems < 0) break;
    ptx::mbarrier_wait(shared.done[slot], parity);
    const int first = item.head != 0 ? 1 : 0, end = item.elems / kChunk;  // whole chunks
    if (first < end) {
      ptx::cp_async_bulk_store(gOut + item.begin + first * kChunk, sRing + item.place + first,
                               16 * (end - first));
      ptx::cp_async_bulk_commit();
      ptx::cp_async_bulk_wait_read();
    }
    ptx::mbarrier_arrive(shared.empty[slot]);
  }
  ptx::cp_async_bulk_wait();
}

template <typename Element>
__device__ __forceinline__ float element_of_chunk(const uint4& chunk, int e) {
  const uint32_t word = e < 2 ? chunk.x : e < 4 ? chunk.y : e < 6 ? chunk.z : chunk.w;
  return element_of<Element>(word, e % 2);
}

// The matrix at `item`, all threads of a group; `meet` is their barrier. `take` is called once.
template <typename Config, typename Element, typename Meet, typename Take>
__device__ __forceinline__ void softmax_ring_item(const RingItem& item, const Element* gP,
                                                  const Element* gGrad, Element* gOut,
                                                  int64_t capacity, uint4* sP, float* sSum,
                                                  float scale, int thread, Meet meet, Take take) {
  constexpr int kChunk = Config::kChunk;
  uint4* sGrad = sP + item.chunks;
  const int step = item.abreast * item.columns, last = item.chunks - 1, tail = item.elems % kChunk;
  const int first = thread < step ? thread : item.chunks;
  // Of others' elements p dp is 0.
  const bool has_first = thread == 0 && item.head != 0,
             has_last = tail != 0 && thread == last % step;
  auto* sElems = reinterpret_cast<Element*>(sP);
  auto* sGradElems = reinterpret_cast<Element*>(sGrad);
  if (has_first) {
    for (int e = 0; e < item.head; ++e) sElems[e] = sGradElems[e] = from_sum<Element>(0);
  }
  if (has_last) {
    const int chunk = last * kChunk;
    if (item.begin + chunk + kChunk > capacity) {  // nobody has copied it
      for (int e = last == 0 ? item.head : chunk; e < item.elems; ++e) {
        sElems[e] = gP[item.begin + e];
        sGradElems[e] = gGrad[item.begin + e];
      }
    }
    for (int e = item.elems; e < chunk + kChunk; ++e) {
      sElems[e] = sGradElems[e] = from_sum<Element>(0);
    }
  }
  float sum[kChunk] = {};
#pragma unroll 2
  for (int k = first; k < item.chunks; k += step) {
    const uint4 p = sP[k], grad = sGrad[k];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      sum[e] = fmaf(element_of_chunk<Element>(p, e), element_of_chunk<Element>(grad, e), sum[e]);
    }
  }
  auto* sOwn = reinterpret_cast<float4*>(sSum + kChunk * thread);
  if (thread < step) {
    sOwn[0] = {sum[0], sum[1], sum[2], sum[3]};
    sOwn[1] = {sum[4], sum[5], sum[6], sum[7]};
  }
  meet();  // the threads' sums are there
  take();
  if (thread < item.columns) {
    // Sums of one column lie as its elements do: every C-th.
    const int count = kChunk * item.abreast;
    float* sColumn = sSum + thread;
    float all = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) all += sColumn[i * item.columns];
#pragma unroll 4
    for (int i = 0; i < count; ++i) sColumn[i * item.columns] = all;
  }
  meet();  // the columns' sums are there
  if (thread < step) {
    const float4 low = sOwn[0], high = sOwn[1];
    sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
    sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
  }
#pragma unroll 2
  for (int k = first; k < item.chunks; k += step) {
    const uint4 p = sP[k], grad = sGrad[k];
    float result[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      result[e] =
          scale * element_of_chunk<Element>(p, e) * (element_of_chunk<Element>(grad, e) - sum[e]);
    }
    sP[k] = {pack<Element>(result[0], result[1]), pack<Element>(result[2], result[3]),
             pack<Element>(result[4], result[5]), pack<Element>(result[6], result[7])};
  }
  // Of an end chunk the matrix's own elements
  if (has_first) {
    for (int e = item.head; e < min(kChunk, item.elems); ++e) gOut[item.begin + e] = sElems[e];
  }
  if (has_last && (last > 0 || !has_first)) {
    for (int e = last * kChunk; e < item.elems; ++e) gOut[item.begin + e] = sElems[e];
  }
}

// What the share has of large matrices, and of none. All threads of the CTA.
template <typename Config, typename Params>
__device__ __noinline__ void softmax_rest(const RingLaunch<Params>& launch) {
  using Spans = typename Config::Spans;
  const MatricesView& matrices = launch.spans.params.matrices;
  SpanPlan& plan = span_shared<Spans>().plan;
  const int64_t low = blockIdx.x * launch.share, end = low + launch.share;
  const int64_t high = end < matrices.capacity ? end : matrices.capacity;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t seq = last_matrix_before(matrices, low);; seq += 32) {
    // Each warp finds the same.
    const RingPart part = ring_part<Config>(matrices, seq + lane, low, high);
    unsigned left = __ballot_sync(kAllLanes, part.is_rest());
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      if (threadIdx.x == __ffs(static_cast<int>(left)) - 1) {
        LargePlan large{};
        if (part.is_large) {
          const int64_t begin = part.matrix.begin;
          const int64_t elems = part.matrix.rows.len * part.matrix.columns.len;
          const int64_t first_cta = begin / launch.share,
                        last_cta = (begin + elems - 1) / launch.share;
          large = plan_large<Spans>(part.matrix, true, launch.spans.spans.buffer - Spans::kChunk,
                                    blockIdx.x - first_cta, last_cta - first_cta + 1);
        }
        plan.large[0] = large;
        plan.large[1].first_line = plan.large[1].lines = 0;
        plan.span_elems = 0;
        plan.zeros_begin[0] = part.zeros_begin;
        plan.zeros_end[0] = part.zeros_begin < part.zeros_end ? part.zeros_end : part.zeros_begin;
        plan.zeros_begin[1] = plan.zeros_end[1] = 0;
      }
      __syncthreads();  // the plan is there
      softmax_spans<Spans>(launch.spans);
      __syncthreads();  // all have read it
    }
    const bool last =
        seq + lane >= matrices.rows.num_seqs ||
        __ldg(reinterpret_cast<const long long*>(matrices.offsets) + seq + lane + 1) >= high;
    if (__any_sync(kAllLanes, last)) break;
  }
}

template <typename Config, typename Params>
__global__ __launch_bounds__(Config::kThreads, 1) void matrix_ring_kernel(
    const __grid_constant__ RingLaunch<Params> launch) {
  if (!ptx::kIsSm90a) return;
  using Element = typename Config::Element;
  constexpr int kSlots = Config::kSlots, kGroupThreads = Config::kGroupThreads;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  auto* sRing = reinterpret_cast<uint4*>(dynamic_shared);
  auto& shared = *reinterpret_cast<RingShared<Config>*>(sRing + RingShared<Config>::kRing);
  const Params& params = launch.spans.params;
  const MatricesView& matrices = params.matrices;
  const auto* gP = static_cast<const Element*>(params.out);
  const auto* gGrad = static_cast<const Element*>(params.grad_out);
  auto* gOut = static_cast<Element*>(params.grad_a);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(shared.full[i], 1);
      ptx::mbarrier_init(shared.done[i], kGroupThreads);
      ptx::mbarrier_init(shared.empty[i], 1);
    }
    ptx::fence_mbarrier_init();
    shared.any_rest = 0;
    shared.next = Config::kGroups;
  }
  __syncthreads();  // the barriers are there
  const int warp = threadIdx.x / 32;
  if (warp == Config::kConsumers / 32) {
    const int64_t low = blockIdx.x * launch.share, end = low + launch.share;
    load_ring<Config>(matrices, gP, gGrad, low, end < matrices.capacity ? end : matrices.capacity,
                      sRing, shared);
  } else if (warp == Config::kConsumers / 32 + 1) {
    if (threadIdx.x % 32 == 0) store_ring<Config>(gOut, sRing, shared);
    __syncwarp();
  } else {
    const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const auto scale = static_cast<float>(params.scale);
#pragma unroll 1
    for (int index = group, turn = 0;; turn ^= 1) {
      const int slot = index % kSlots;
      ptx::mbarrier_wait(shared.full[slot], (index / kSlots) & 1);
      const RingItem item = shared.items[slot];
      if (item.elems < 0) break;
      softmax_ring_item<Config>(
          item, gP, gGrad, gOut, matrices.capacity, sRing + item.place, shared.sum[group], scale,
          thread, [&] { ptx::bar_sync(1 + group, kGroupThreads); },
          [&] {
            if (thread == 0) shared.taken[group][turn] = atomicAdd(&shared.next, 1);
          });
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(shared.done[slot]);
      index = shared.taken[group][turn];
    }
  }
  __syncthreads();  // all matrices of the ring are computed and stored
  if (shared.any_rest == 0) return;
  __syncthreads();  // all know it
  softmax_rest<Config>(launch);
}

template <typename Element>
cudaError_t launch_matrix_ring(const Jagged2SoftmaxBackwardParams& params, cudaStream_t stream) {
  using Config = MatrixRingConfig<Element>;
  using Params = Jagged2SoftmaxBackwardParams;
  int device = 0, num_sms = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  constexpr int kBuffer = 52'000;  // elements of an operand
  static_assert(16 * RingShared<Config>::kRing + sizeof(RingShared<Config>) <= Config::kBytes);
  static_assert(SpanShared<typename Config::Spans>::bytes(kBuffer) <= Config::kBytes);
  const int64_t share = (params.matrices.capacity + num_sms - 1) / num_sms;
  return launch<matrix_ring_kernel<Config, Params>>(
      RingLaunch<Params>{{params, {kBuffer, 0}}, share}, {num_sms}, Config::kThreads,
      Config::kBytes, stream, "cuda.jagged2_softmax_backward.rows.ring");
}

}  // namespace jagged_cuda::softmax
